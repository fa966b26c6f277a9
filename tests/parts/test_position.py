"""Position schemes: RoPE turns by relative distance and stays exact far out; ALiBi's slopes are the published ones."""

import math
import warnings

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from regard.at import At
from regard.parts.position.alibi import Alibi, slopes
from regard.parts.position.learned import Learned
from regard.parts.position.none import NoPosition
from regard.parts.position.rope import Rope
from regard.parts.position.sinusoidal import Sinusoidal

PLACES = [0, 1, 255, 256, 257, 2047, 2048, 2049, 131071]
DTYPES = [torch.float64, torch.float32]


def at(*positions: int) -> At:
    return At(torch.tensor([positions]))


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", [10000.0, 500000.0, 7.0])
def test_rope_turns_each_pair_by_its_angle(dtype: torch.dtype, base: float) -> None:
    """Against the formula with Python's own sine and cosine, one pair at a time."""
    dim = 8
    q, k = random(1, 2, len(PLACES), dim, dtype=dtype), random(1, 1, len(PLACES), dim, dtype=dtype) * 2
    turned = Rope(base).build(dim, 2).rotate(q, k, at(*PLACES))
    for x, found in zip((q, k), turned, strict=True):
        assert found.dtype == dtype
        for i in range(dim // 2):
            for n, place in enumerate(PLACES):
                angle = place / base ** (2 * i / dim)
                left, right = x[0, :, n, i].double(), x[0, :, n, i + dim // 2].double()
                limit = 1e-9 if dtype == torch.float64 else 1e-6
                expected = left * math.cos(angle) - right * math.sin(angle)
                assert (found[0, :, n, i] - expected).abs().max() <= limit
                expected = right * math.cos(angle) + left * math.sin(angle)
                assert (found[0, :, n, i + dim // 2] - expected).abs().max() <= limit


@pytest.mark.parametrize("shift", [1, 255, 2048, 131071])
def test_rope_scores_depend_on_the_distance_alone(shift: int) -> None:
    rope, (q, k) = Rope().build(16, 1), (random(1, 1, 6, 16), random(1, 1, 6, 16).flip(-1))
    scores = []
    for offset in (0, shift):
        turned_q, turned_k = rope.rotate(q, k, at(*range(offset, offset + 6)))
        scores.append(turned_q @ turned_k.transpose(-1, -2))
    assert (scores[0] - scores[1]).abs().max() < 1e-8


def test_rope_keeps_lengths_and_begins_as_the_identity() -> None:
    q, k = random(1, 2, 4, 8), random(1, 1, 4, 8)
    turned, _ = Rope().build(8, 2).rotate(q, k, at(0, 5, 900, 131071))
    assert torch.allclose(turned.norm(dim=-1), q.norm(dim=-1), atol=1e-12)
    assert torch.equal(turned[:, :, 0], q[:, :, 0])


def test_two_ropes_in_one_model_do_not_share_angles() -> None:
    """Waves are computed once a forward for all layers alike; layers that differ must not meet there."""
    q, where = random(1, 1, 3, 8), at(0, 3, 9)
    for spec in (Rope(), Rope(100.0)):
        fresh = spec.build(8, 1).rotate(q, q, at(0, 3, 9))[0]
        assert torch.equal(spec.build(8, 1).rotate(q, q, where)[0], fresh)
    narrow = random(1, 1, 3, 4)
    assert Rope().build(4, 1).rotate(narrow, narrow, where)[0].shape == narrow.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinusoidal_is_its_formula(dtype: torch.dtype) -> None:
    found = Sinusoidal().build(6, 1).embed(torch.zeros(1, len(PLACES), 6, dtype=dtype), at(*PLACES))
    assert found.dtype == dtype
    for n, place in enumerate(PLACES):
        for i in range(3):
            angle = place / 10000 ** (2 * i / 6)
            assert abs(found[0, n, 2 * i].item() - math.sin(angle)) < 1e-7
            assert abs(found[0, n, 2 * i + 1].item() - math.cos(angle)) < 1e-7


def test_learned_adds_the_row_of_its_position() -> None:
    module, x = Learned(10).build(4, 1), torch.ones(1, 3, 4)
    assert torch.equal(module.embed(x, at(7, 0, 9)), x + module.table.weight[[7, 0, 9]])


@pytest.mark.parametrize("heads", range(1, 21))
def test_alibi_slopes_are_those_of_transformers(heads: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)  # (H, 1, S): slope · key position
    assert torch.allclose(slopes(heads).float(), theirs[:, 0, 1], rtol=1e-6)


@pytest.mark.parametrize("heads", range(1, 21))
def test_alibi_slopes_are_those_of_the_paper(heads: int) -> None:
    power = 1 << heads.bit_length() - 1
    exponents = [8 * h / power for h in range(1, power + 1)] + [4 * h / power for h in range(1, 2 * power, 2)]
    for found, exponent in zip(slopes(heads).tolist(), exponents, strict=False):
        assert found == pytest.approx(2**-exponent, rel=1e-15)


def test_alibi_counts_true_distances() -> None:
    bias = Alibi().build(8, 2).bias(at(9))
    where = At(torch.tensor([[9]])).with_keys(torch.tensor([[0, 8, 9]]))
    expected = -torch.tensor([1 / 16, 1 / 256]).view(2, 1) * torch.tensor([9.0, 1.0, 0.0])
    assert torch.equal(bias.values(where, torch.float32)[0, :, 0], expected)


def test_alibi_keeps_its_precision_in_a_half_precision_model() -> None:
    """bfloat16 has eight bits: a slope of 2^-0.5 is off by a thousandth, a distance of 1001 becomes 1000."""
    where = At(torch.tensor([[1001]])).with_keys(torch.tensor([[0, 1, 600]]))
    values = Alibi().build(8, 16).bfloat16().bias(where).values(where, torch.bfloat16)
    exact = -slopes(16).view(16, 1) * torch.tensor([1001.0, 1000.0, 401.0], dtype=torch.float64)
    assert torch.equal(values[0, :, 0], exact.bfloat16())
    exact = Alibi().build(8, 16).bias(where).values(where, torch.float64)
    assert (exact[0, :, 0, 0] + 1001 * slopes(16)).abs().max() < 1e-12


def test_no_position_is_the_identity() -> None:
    module, x = NoPosition().build(4, 1), random(1, 1, 2, 4)
    assert module.embed(x, at(0, 1)) is x
    assert module.rotate(x, x, at(0, 1)) == (x, x)
    assert module.bias(at(0, 1)) is None
