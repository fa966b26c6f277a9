"""Sinusoidal positions: formula and published values, shifts as rotations, and Marian's layout."""

import math

import pytest
import torch
from torch import Tensor
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from regard.layout import TokenLayout
from regard.parts.position.sinusoidal import Sinusoidal

POSITIONS = [0, 1, 255, 256, 257, 2047, 2048, 2049, 131071]


def embeddings(positions: list[int] | Tensor, width: int, layout: str = "interleaved", dtype=torch.float64) -> Tensor:
    """Returns the embeddings of these positions, (L, D)."""
    module, x = Sinusoidal(layout=layout).build(width, 1), torch.zeros(1, len(positions), width, dtype=dtype)
    return module.embed(x, TokenLayout(torch.as_tensor(positions).unsqueeze(0)))[0]


@pytest.mark.ledger("pos.sin")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("width", [6, 7])
def test_equals_its_formula(dtype: torch.dtype, width: int) -> None:
    found = embeddings(POSITIONS, width, dtype=dtype)
    assert found.dtype == dtype
    for n, position in enumerate(POSITIONS):
        for j in range(width):
            wave = math.cos if j % 2 else math.sin
            limit = 1e-11 if dtype == torch.float64 else 1e-7
            assert abs(found[n, j].item() - wave(position / 10000 ** (j // 2 * 2 / width))) < limit


@pytest.mark.ledger("pos.sin")
@pytest.mark.parametrize("width", [8, 9])
def test_equals_three_common_implementations(width: int) -> None:
    t, even = torch.arange(50).double().unsqueeze(-1), torch.arange(0, width, 2).double()
    divided = t / 10000 ** (even / width)
    multiplied = t * torch.exp(even * -(math.log(10000.0) / width))
    by_column = t / 10000 ** ((torch.arange(width) // 2 * 2).double() / width)
    table = torch.zeros(50, width).double()
    table[:, 0::2] = torch.sin(multiplied)
    table[:, 1::2] = torch.cos(multiplied)[:, : width // 2]
    selected = torch.where(torch.arange(width) % 2 == 0, by_column.sin(), by_column.cos())
    stacked = torch.stack([divided.sin(), divided.cos()], -1).flatten(1)[:, :width]
    for expected in (table, selected, stacked):
        assert (embeddings(list(range(50)), width) - expected).abs().max() < 1e-12


@pytest.mark.ledger("pos.sin.d4")
def test_values_for_width_four_equal_the_published_ones() -> None:
    """Denominators 1 and 100."""
    found = embeddings([0, 1], 4)
    assert found[0].tolist() == [0, 1, 0, 1]
    assert [f"{x:.4f}" for x in found[1, :3].tolist()] == ["0.8415", "0.5403", "0.0100"]
    assert f"{found[1, 3].item():.5f}" == "0.99995"


@pytest.mark.ledger("pos.sin.p12")
def test_values_of_position_twelve_equal_the_published_ones() -> None:
    assert [f"{x:.2f}" for x in embeddings([12], 16)[0, [0, 4, 10]].tolist()] == ["-0.54", "0.93", "0.04"]


@pytest.mark.ledger("pos.sin.waves")
def test_wavelengths_grow_geometrically_and_every_pair_is_on_the_unit_circle() -> None:
    width = 64
    periods = [2 * math.pi * 10000 ** (2 * i / width) for i in range(width // 2)]
    assert periods[0] == pytest.approx(2 * math.pi)
    assert periods[-1] == pytest.approx(2 * math.pi * 10000 ** ((width - 2) / width))
    start = torch.tensor([0.0, 3.0, 77.0]).double()
    for i, period in enumerate(periods):  # the formula also holds between integer positions
        once, again, half = (embeddings(start + share * period, width)[:, 2 * i : 2 * i + 2] for share in (0, 1, 0.5))
        assert (once - again).abs().max() < 1e-9
        assert (once + half).abs().max() < 1e-9
    points = embeddings(list(range(0, 65536, 97)), width).unflatten(-1, (-1, 2))
    assert (points.norm(dim=-1) - 1).abs().max() < 1e-12


@pytest.mark.ledger("pos.sin.waves", "pos.sin.dot")
def test_no_two_positions_have_the_same_embedding() -> None:
    """|P(s) - P(t)|² = 2 Σ (1 - cos ω_i(t - s)), so the distances from position 0 are the distances of all pairs."""
    table = embeddings(list(range(65536)), 64)
    gaps = (table[1:] - table[0]).norm(dim=-1)
    assert gaps.min().item() == pytest.approx((table[1] - table[0]).norm().item())  # adjacent positions are nearest
    assert gaps.min() > 1
    starts = torch.randint(0, 65536 - 1, (200,), generator=torch.Generator().manual_seed(0))
    assert ((table[starts + 1] - table[starts]).norm(dim=-1) - gaps[0]).abs().max() < 1e-9


@pytest.mark.ledger("pos.sin.shift")
@pytest.mark.parametrize("delta", [1, 7, 1000])
def test_a_shift_is_the_same_rotation_at_all_positions(delta: int) -> None:
    """P(t + Δ) = R_Δ P(t), with blocks [[cos, sin], [-sin, cos]] of ω_iΔ because the sine comes first."""
    width, t = 16, torch.randint(0, 5000, (40,), generator=torch.Generator().manual_seed(0))
    angles = [delta * 10000 ** (-2 * i / width) for i in range(width // 2)]
    rotation = torch.block_diag(
        *(torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]).double() for a in angles)
    )
    assert (embeddings(t + delta, width) - embeddings(t, width) @ rotation.T).abs().max() < 1e-6
    assert (embeddings(t + delta, width) - embeddings(t, width) @ rotation).abs().max() > 0.5


@pytest.mark.ledger("pos.sin.dot")
@pytest.mark.parametrize("delta", [0, 1, 10, 1000])
def test_a_dot_product_depends_only_on_the_distance(delta: int) -> None:
    width, t = 32, torch.randint(0, 100_000, (40,), generator=torch.Generator().manual_seed(0))
    products = (embeddings(t, width) * embeddings(t + delta, width)).sum(-1)
    expected = sum(math.cos(delta * 10000 ** (-2 * i / width)) for i in range(width // 2))
    assert (products - expected).abs().max() < 1e-9
    assert delta != 0 or expected == width / 2


@pytest.mark.parametrize("width", [8, 9])
def test_the_half_layout_equals_marian(width: int) -> None:
    theirs = MarianSinusoidalPositionalEmbedding(40, width).create_weight()
    assert (embeddings(list(range(40)), width, "half") - theirs).abs().max() < 1e-7
