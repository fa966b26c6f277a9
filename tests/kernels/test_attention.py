"""Backends against the reference, the reference against plain loops; rows that see nothing give zeros, not NaN."""

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from regard.at import At
from regard.kernels.attention import BACKENDS, backend, reference
from regard.kernels.attention.bias import Slopes
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.scores import Scores

LENGTH, DIM = 9, 8
HEADS = {"multi-head": (4, 4), "grouped-query": (4, 2), "multi-query": (4, 1)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def one_query_before_remembered_keys() -> At:
    """A decode step: rows of different lengths before nine slots, of which one is not valid."""
    slots = torch.arange(LENGTH).expand(2, LENGTH)
    return At(torch.tensor([[3], [8]])).with_keys(slots, valid=slots != 1)


def where_all_tokens_stand() -> dict[str, At]:
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    documents = torch.tensor([[0] * 4 + [1] * 5, [2] * LENGTH])
    restarted = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], list(range(LENGTH))])
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    valid[0, 6:] = valid[1, :2] = False
    return {
        "ordered": At.whole(2, LENGTH),
        "positions": At(positions),
        "segments": At(restarted, segments=documents),
        "valid": At(positions, valid=valid),
        "segments and valid": At(restarted, segments=documents, valid=valid),
        "keys": At(positions[:, 4:7]).with_keys(positions),
        "one query": one_query_before_remembered_keys(),
    }


AT = where_all_tokens_stand()
MASKS: dict[str, Mask] = {"causal": Causal(), "full": Full()}


def inputs(heads: str, at: At, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    h, k = HEADS[heads]
    shapes = [(2, h, at.positions.shape[1], DIM), *[(2, k, at.key_positions.shape[1], DIM)] * 2]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def slopes(dtype: torch.dtype) -> Slopes:
    return Slopes(torch.tensor([0.5, 0.25, 0.0625, 1.5], dtype=dtype))


def with_gradients(attend, tensors: list[Tensor], at: At, mask: Mask, bias: Slopes | None) -> list[Tensor]:
    out = attend(*tensors, at, Scores(mask, 0.7, bias))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
def test_a_backend_is_the_reference(name, heads, at, mask, biased, dtype) -> None:
    bias = slopes(dtype) if biased else None
    tensors = inputs(heads, AT[at], dtype)
    found = with_gradients(backend(name), tensors, AT[at], MASKS[mask], bias)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = with_gradients(reference.attend, wide, AT[at], MASKS[mask], slopes(torch.float64) if biased else None)
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == dtype
        assert (f - e).abs().max() <= TOLERANCE[dtype] * e.abs().max().clamp_min(1)


def plain_loops(q: Tensor, k: Tensor, v: Tensor, at: At, causal: bool, slope: list[float], scale: float) -> Tensor:
    """The definition, one number at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b, h, i in product(*map(range, q.shape[:3])):
        scores = {}
        for j in range(k.shape[2]):
            distance = int(at.positions[b, i] - at.key_positions[b, j])
            seen = distance >= 0 or not causal
            seen = seen and (at.segments is None or bool(at.segments[b, i] == at.key_segments[b, j]))
            seen = seen and (at.key_valid is None or bool(at.key_valid[b, j]))
            if seen:
                product_ = sum(float(x) * float(y) for x, y in zip(q[b, h, i], k[b, h // group, j], strict=True))
                scores[j] = product_ * scale - slope[h] * abs(distance)
        total = sum(math.exp(s) for s in scores.values())
        for j, s in scores.items():
            out[b, h, i] += math.exp(s) / total * v[b, h // group, j]
    return out


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("heads", HEADS)
def test_the_reference_is_its_definition(heads: str, at: str, mask: str, biased: bool) -> None:
    q, k, v = (x.detach() for x in inputs(heads, AT[at], torch.float64))
    bias = slopes(torch.float64) if biased else None
    found = reference.attend(q, k, v, AT[at], Scores(MASKS[mask], 0.7, bias))
    slope = bias.slopes.tolist() if biased else [0.0] * 4
    expected = plain_loops(q, k, v, AT[at], mask == "causal", slope, 0.7)
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("at", ["all", "one query"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(dtype, name, heads, at, biased) -> None:
    slots = torch.arange(LENGTH).expand(2, LENGTH)
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    valid[0] = False  # nothing at all in this row
    valid[1, :3] = False  # its first three queries see nothing
    where = At(slots, valid=valid) if at == "all" else At(torch.tensor([[5], [5]])).with_keys(slots, valid)
    tensors = inputs(heads, where, dtype)
    out, *gradients = with_gradients(backend(name), tensors, where, Causal(), slopes(dtype) if biased else None)
    blind = out[:, :, 0] if at == "all" else out[:1]
    assert not blind.any()
    assert out[1, :, -1].abs().min() > 0
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_on_a_gpu_too(heads: str, dtype: torch.dtype) -> None:
    slots = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    valid = torch.ones(2, LENGTH, dtype=torch.bool, device="cuda")
    valid[0] = valid[1, :3] = False
    where = At(slots, valid=valid)
    tensors = [x.detach().cuda().requires_grad_() for x in inputs(heads, where, dtype)]
    out, *gradients = with_gradients(backend("sdpa"), tensors, where, Causal(), None)
    assert not out[0].any()
    assert not out[1, :, :3].any()
    assert all(g.isfinite().all() for g in gradients)


def test_attention_weights_are_rows_of_one_or_zero() -> None:
    at = AT["segments and valid"]
    q, k, _ = (x.detach() for x in inputs("grouped-query", at, torch.float32))
    sums = reference.attention_weights(q, k, at, Scores(Causal())).sum(-1)
    assert torch.logical_or((sums - 1).abs() < 1e-6, sums == 0).all()
    assert (sums == 0).any()


def test_half_precision_sums_in_float32() -> None:
    """Sixteen thousand equal scores: in bfloat16 their sum would stop growing at 256."""
    k, at = torch.zeros(1, 1, 16384, 2, dtype=torch.bfloat16), At(torch.tensor([[16383]]))
    at = at.with_keys(torch.arange(16384).unsqueeze(0))
    v = torch.ones_like(k)
    out = reference.attend(k[:, :, :1], k, v, at, Scores(Causal()))
    assert torch.equal(out, torch.ones(1, 1, 1, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "alibi"])
def test_the_reference_is_not_changed_by_autocast(biased: bool) -> None:
    at, bias = AT["segments and valid"], slopes(torch.float32) if biased else None
    q, k, v = (x.detach() for x in inputs("grouped-query", at, torch.float32))
    expected = reference.attend(q, k, v, at, Scores(Causal(), bias=bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reference.attend(q, k, v, at, Scores(Causal(), bias=bias)), expected)


@dataclass(frozen=True)
class Odd(Causal):
    """Causal, but of the tokens before it one sees those at odd positions only."""

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k % 2 == 1) | (k == q))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_stricter_causal_mask_takes_no_short_cut(name: str) -> None:
    tensors = [x.detach() for x in inputs("multi-head", AT["ordered"], torch.float64)]
    plain, strict = (backend(name)(*tensors, At.whole(2, LENGTH), Scores(mask)) for mask in (Causal(), Odd()))
    expected = reference.attend(*tensors, At(AT["positions"].positions), Scores(Odd()))
    assert (strict - expected).abs().max() < 1e-12
    assert (strict - plain).abs().max() > 0.1


def test_an_unknown_backend_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="'spda'; did you mean 'sdpa'"):
        backend("spda")
