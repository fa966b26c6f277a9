"""The reference equals its definition in loops; sums in half precision, autocast, and subclasses of Causal."""

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from regard.kernels.attention import BACKENDS, backend, reference
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.bias import Slopes
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from tests.kernels.cases import DIM, EXTRAS, HEADS, LAYOUTS, LENGTH, MASKS, inputs, options_of


def attend_in_loops(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    """The definition of attention, one score at a time."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    slopes = options.bias.slopes.tolist() if isinstance(options.bias, Slopes) else [0.0] * q.shape[1]
    queries, keys = q.tolist(), k.tolist()
    for b, i in product(range(len(q)), range(q.shape[2])):
        attended = {j: distance(layout, b, i, j) for j in range(k.shape[2]) if attends(layout, options, b, i, j)}
        for h in range(q.shape[1]):
            scores = {}
            for j, token_distance in attended.items():
                s = sum(x * y for x, y in zip(queries[b][h][i], keys[b][h // group][j], strict=True)) * options.scale
                s = s if options.softcap is None else options.softcap * math.tanh(s / options.softcap)
                scores[j] = s - slopes[h] * token_distance
            total = sum(math.exp(s) for s in scores.values())
            total += 0.0 if options.sinks is None else math.exp(options.sinks[h].item())
            for j, s in scores.items():
                out[b, h, i] += math.exp(s) / total * v[b, h // group, j]
    return out


def distance(layout: TokenLayout, b: int, i: int, j: int) -> int:
    return abs(int(layout.positions[b, i] - layout.key_positions[b, j]))


def attends(layout: TokenLayout, options: ScoreOptions, b: int, i: int, j: int) -> bool:
    allowed = options.mask.allows(layout.positions[b, i].view(1, 1), layout.key_positions[b, j].view(1, 1))
    if allowed is not None and not allowed:
        return False
    if layout.segments is not None and layout.segments[b, i] != layout.key_segments[b, j]:
        return False
    if layout.key_visible is not None:
        start, end = (int(bound[b, j]) for bound in layout.key_visible)
        if not start <= int(layout.positions[b, i]) < end:
            return False
    return layout.key_valid is None or bool(layout.key_valid[b, j])


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("layout_name", ["ordered", "packed and padded", "one query", "visible keys"])
@pytest.mark.parametrize(("mask", "heads", "bias"), [
    ("causal", "multi-head", "slopes"), ("full", "grouped-query", None), ("window", "multi-query", "slopes"),
])  # fmt: skip
def test_reference_equals_its_definition(mask: str, heads: str, bias: str | None, layout_name: str, extra: str) -> None:
    rows, layout = slice(0, 1), LAYOUTS[layout_name]
    q, k, v = (x.detach() for x in inputs(heads, layout, torch.float64))
    options = options_of(MASKS[mask], bias, extra, torch.float64)
    found = reference.attend(q, k, v, layout, options).detach()[rows]
    expected = attend_in_loops(q[rows], k[rows], v[rows], layout, options)
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", sorted(BACKENDS.keys() - {"decode"}))
def test_backends_on_a_gpu_equal_the_reference(name: str, heads: str, dtype: torch.dtype) -> None:
    slots = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    valid = torch.ones(2, LENGTH, dtype=torch.bool, device="cuda")
    valid[0] = valid[1, :3] = False
    layout = TokenLayout(slots, valid=valid, consecutive=True)
    tensors = [x.detach().cuda().requires_grad_() for x in inputs(heads, layout, dtype, value_dim=DIM)]
    if (name, dtype) == ("triton", torch.float32):
        with pytest.raises(ValueError, match="less exact than PyTorch in float32"):
            backend(name)(*tensors, layout, ScoreOptions(MASKS["window"]))
        return
    out = backend(name)(*tensors, layout, ScoreOptions(MASKS["window"]))
    assert not out[0].any()
    assert not out[1, :, :3].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), tensors))
    in_float64 = [x.detach().double() for x in tensors]
    expected = reference.attend(*in_float64, layout, ScoreOptions(MASKS["window"]))
    assert (out - expected)[1, :, 3:].abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("name", ["reference", "sdpa", "tiled", "block_sparse"])
def test_consecutive_query_heads_share_a_key_head(name: str, kv_heads: int) -> None:
    """Of six query heads, head h attends to key head h // (6 / kv_heads); each pair equals attention with one head."""
    q, k, v = (torch.randn(1, heads, 9, 8, dtype=torch.float64) for heads in (6, kv_heads, kv_heads))
    layout, options = TokenLayout.whole(1, 9), ScoreOptions(Window(4))
    found = backend(name)(q, k, v, layout, options)
    weights = reference.attention_weights(q, k, layout, options)
    for head, key_head in enumerate(torch.arange(kv_heads).repeat_interleave(6 // kv_heads).tolist()):
        one_head = [x[:, i : i + 1] for x, i in ((q, head), (k, key_head), (v, key_head))]
        assert (found[:, head : head + 1] - reference.attend(*one_head, layout, options)).abs().max() < 1e-12
        assert (
            weights[:, head : head + 1] - reference.attention_weights(*one_head[:2], layout, options)
        ).abs().max() < 1e-12


def test_attention_weights_sum_to_one_or_zero() -> None:
    layout = LAYOUTS["packed and padded"]
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
def test_autocast_does_not_change_the_result(name: str, bias: str | None) -> None:
    layout, options = LAYOUTS["packed and padded"], options_of(Causal(), bias, "", torch.float32)
    q, k, v = (x.detach() for x in inputs("grouped-query", layout, torch.float32))
    expected = backend(name)(q, k, v, layout, options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(backend(name)(q, k, v, layout, options), expected)


@dataclass(frozen=True)
class OddKeys(Causal):
    """Causal, but a query attends only to its own key and to keys at odd positions."""

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k % 2 == 1) | (k == q))


@pytest.mark.parametrize("name", ["sdpa", "tiled", "auto"])
def test_subclass_of_causal_is_not_treated_as_causal(name: str) -> None:
    tensors = [x.detach() for x in inputs("multi-head", LAYOUTS["ordered"], torch.float64)]
    causal, odd = (
        backend(name)(*tensors, TokenLayout.whole(2, LENGTH), ScoreOptions(mask)) for mask in (Causal(), OddKeys())
    )
    expected = reference.attend(*tensors, TokenLayout(LAYOUTS["positions"].positions), ScoreOptions(OddKeys()))
    assert (odd - expected).abs().max() < 1e-12
    assert (odd - causal).abs().max() > 0.1


def test_unknown_backend_suggests_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="'spda'; did you mean 'sdpa'"):
        backend("spda")
