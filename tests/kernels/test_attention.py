"""The reference against plain loops; half precision, autocast, and masks that no short cut may forget."""

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from regard.kernels.attention import BACKENDS, backend, reference
from regard.kernels.attention.bias import Slopes
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.score_options import ScoreOptions
from regard.layout import TokenLayout
from tests.kernels.cases import AT, DIM, EXTRAS, HEADS, LENGTH, MASKS, inputs, scores_of


def plain_loops(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    """The definition, one number at a time."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    slopes = scores.bias.slopes.tolist() if isinstance(scores.bias, Slopes) else [0.0] * q.shape[1]
    for b, h, i in product(*map(range, q.shape[:3])):
        found = {}
        for j in range(k.shape[2]):
            here, there = layout.positions[b, i], layout.key_positions[b, j]
            allowed = scores.mask.allows(here.view(1, 1), there.view(1, 1))
            seen = allowed is None or bool(allowed)
            seen = seen and (layout.segments is None or bool(layout.segments[b, i] == layout.key_segments[b, j]))
            seen = seen and (layout.key_valid is None or bool(layout.key_valid[b, j]))
            if seen:
                s = sum(x * y for x, y in zip(q[b, h, i].tolist(), k[b, h // group, j].tolist(), strict=True))
                s *= scores.scale
                s = s if scores.softcap is None else scores.softcap * math.tanh(s / scores.softcap)
                found[j] = s - slopes[h] * abs(int(here - there))
        total = sum(math.exp(s) for s in found.values())
        total += 0.0 if scores.sinks is None else math.exp(scores.sinks[h].item())
        for j, s in found.items():
            out[b, h, i] += math.exp(s) / total * v[b, h // group, j]
    return out


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("layout", ["ordered", "packed and padded", "one query"])
@pytest.mark.parametrize(("mask", "heads", "bias"), [
    ("causal", "multi-head", "slopes"), ("full", "grouped-query", None), ("window", "multi-query", "slopes"),
])  # fmt: skip
def test_the_reference_is_its_definition(mask: str, heads: str, bias: str | None, layout: str, extra: str) -> None:
    rows = slice(0, 1)
    where = AT[layout]
    q, k, v = (x.detach() for x in inputs(heads, where, torch.float64))
    scores = scores_of(MASKS[mask], bias, extra, torch.float64)
    found = reference.attend(q, k, v, where, scores).detach()[rows]
    expected = plain_loops(q[rows], k[rows], v[rows], where, scores)
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BACKENDS.keys() - {"decode"})
def test_on_a_gpu_too(name: str, heads: str, dtype: torch.dtype) -> None:
    slots = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    valid = torch.ones(2, LENGTH, dtype=torch.bool, device="cuda")
    valid[0] = valid[1, :3] = False
    layout = TokenLayout(slots, valid=valid, consecutive=True)
    tensors = [x.detach().cuda().requires_grad_() for x in inputs(heads, layout, dtype, value=DIM)]
    if (name, dtype) == ("triton", torch.float32):
        with pytest.raises(ValueError, match="less exact than PyTorch in float32"):
            backend(name)(*tensors, layout, ScoreOptions(MASKS["window"]))
        return
    out = backend(name)(*tensors, layout, ScoreOptions(MASKS["window"]))
    assert not out[0].any()
    assert not out[1, :, :3].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), tensors))
    wide = [x.detach().double() for x in tensors]
    expected = reference.attend(*wide, layout, ScoreOptions(MASKS["window"]))
    assert (out - expected)[1, :, 3:].abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("name", ["reference", "sdpa", "tiled", "block_sparse"])
def test_consecutive_query_heads_share_a_key_head(name: str, groups: int) -> None:
    """Of six query heads, head h reads key head h // (6 / groups): each gives what it gives alone."""
    q, k, v = (torch.randn(1, heads, 9, 8, dtype=torch.float64) for heads in (6, groups, groups))
    layout, scores = TokenLayout.whole(1, 9), ScoreOptions(Window(4))
    found = backend(name)(q, k, v, layout, scores)
    weights = reference.attention_weights(q, k, layout, scores)
    for head, shared in enumerate(torch.arange(groups).repeat_interleave(6 // groups).tolist()):
        one = [x[:, i : i + 1] for x, i in ((q, head), (k, shared), (v, shared))]
        assert (found[:, head : head + 1] - reference.attend(*one, layout, scores)).abs().max() < 1e-12
        assert (weights[:, head : head + 1] - reference.attention_weights(*one[:2], layout, scores)).abs().max() < 1e-12


def test_attention_weights_are_rows_of_one_or_zero() -> None:
    layout = AT["packed and padded"]
    q, k, _ = (x.detach() for x in inputs("grouped-query", layout, torch.float32))
    sums = reference.attention_weights(q, k, layout, ScoreOptions(Causal())).sum(-1)
    assert torch.logical_or((sums - 1).abs() < 1e-6, sums == 0).all()
    assert (sums == 0).any()


@pytest.mark.parametrize("name", ["reference", "tiled"])
def test_half_precision_sums_in_float32(name: str) -> None:
    """Sixteen thousand equal scores: in bfloat16 their sum would stop growing at 256."""
    k, layout = torch.zeros(1, 1, 16384, 2, dtype=torch.bfloat16), TokenLayout(torch.tensor([[16383]]))
    layout = layout.with_keys(torch.arange(16384).unsqueeze(0))
    v = torch.ones_like(k)
    out = backend(name)(k[:, :, :1], k, v, layout, ScoreOptions(Causal()))
    assert torch.equal(out, torch.ones(1, 1, 1, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("bias", ["slopes", None])
@pytest.mark.parametrize("name", ["reference", "tiled"])
def test_autocast_changes_nothing(name: str, bias: str | None) -> None:
    layout, scores = AT["packed and padded"], scores_of(Causal(), bias, "", torch.float32)
    q, k, v = (x.detach() for x in inputs("grouped-query", layout, torch.float32))
    expected = backend(name)(q, k, v, layout, scores)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(backend(name)(q, k, v, layout, scores), expected)


@dataclass(frozen=True)
class Odd(Causal):
    """Causal, but of the tokens before it one sees those at odd positions only."""

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k % 2 == 1) | (k == q))


@pytest.mark.parametrize("name", ["sdpa", "tiled", "auto"])
def test_a_stricter_causal_mask_takes_no_short_cut(name: str) -> None:
    tensors = [x.detach() for x in inputs("multi-head", AT["ordered"], torch.float64)]
    plain, strict = (
        backend(name)(*tensors, TokenLayout.whole(2, LENGTH), ScoreOptions(mask)) for mask in (Causal(), Odd())
    )
    expected = reference.attend(*tensors, TokenLayout(AT["positions"].positions), ScoreOptions(Odd()))
    assert (strict - expected).abs().max() < 1e-12
    assert (strict - plain).abs().max() > 0.1


def test_an_unknown_backend_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="'spda'; did you mean 'sdpa'"):
        backend("spda")
