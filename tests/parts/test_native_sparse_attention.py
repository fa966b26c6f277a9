"""Native sparse attention equals plain loops; its choice of blocks, largest tensor and FLOPs."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from regard.kernels.attention import reference
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal
from regard.kernels.native_sparse import CHUNK, attend_to_blocks, choose_blocks, importance, sort_keys
from regard.layout import TokenLayout
from regard.parts.attention import Attention, use_backend
from regard.parts.native_sparse_attention import NativeSparse, NativeSparseModule
from regard.parts.position.alibi import Alibi
from regard.parts.position.rope import Rope
from regard.spec import SpecError
from tests.kernels.largest_tensor import LargestTensor
from tests.parts.attention_layer import random

WIDTH, LENGTH = 12, 23
SPECS = {
    "grouped, rope": NativeSparse(4, 2, 4, length=4, stride=2, block=4, select=3, window=3, position=Rope()),
    "multi-query, blocks without overlap": NativeSparse(3, 1, length=2, stride=2, block=2, select=4, window=2),
    "blocks shorter than compressed ones": NativeSparse(2, 2, 4, length=6, stride=2, block=2, select=5, window=1),
    "stride one": NativeSparse(2, 1, 4, length=3, stride=1, block=3, select=3, window=4),
    "alibi": NativeSparse(4, 2, length=4, stride=2, block=4, select=4, window=3, position=Alibi()),
}
DOCUMENTS = [(9, 0), (1, 1), (13, 2)]  # lengths and segments


def packed_and_padded() -> TokenLayout:
    """A packed row of three documents, and a row that is padded on the left."""
    positions = torch.cat([torch.arange(length) for length, _ in DOCUMENTS])
    segments = torch.cat([torch.full((length,), segment) for length, segment in DOCUMENTS])
    pads = 4
    return TokenLayout(
        torch.stack([positions, (torch.arange(LENGTH) - pads).clamp_min(0)]),
        torch.stack([segments, torch.zeros(LENGTH).long()]),
        torch.stack([torch.ones(LENGTH, dtype=torch.bool), torch.arange(LENGTH) >= pads]),
    )


LAYOUTS = {"whole": TokenLayout.whole(2, LENGTH), "packed and padded": packed_and_padded()}


def build(spec: NativeSparse) -> NativeSparseModule:
    module = spec.build(WIDTH).double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=n) * 0.7
    return module


def softmax(scores: list[float]) -> list[float]:
    total = sum(map(math.exp, scores))
    return [math.exp(s) / total for s in scores]


def plain_loop(module: NativeSparseModule, spec: NativeSparse, x: Tensor) -> Tensor:
    """The equation for one document (n, D), token by token."""
    heads, kv_heads, dim = spec.attention.sizes(WIDTH)
    weight, groups = module.state_dict(), heads // kv_heads

    def rotate(x: Tensor, position: int) -> Tensor:
        if not isinstance(spec.position, Rope):
            return x
        angles = [position * spec.position.base ** (-2 * i / dim) for i in range(dim // 2)]
        cos, sin = (torch.tensor([f(a) for a in angles], dtype=x.dtype) for f in (math.cos, math.sin))
        a, b = x.chunk(2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin])

    def bias(h: int, i: int, j: int) -> float:
        return -(2 ** (-8 * (h + 1) / heads)) * (i - j) if spec.position == Alibi() else 0.0

    def summary(name: str, block: Tensor) -> Tensor:
        block = (block + weight[f"{name}_summary.places"]).flatten()
        inner = weight[f"{name}_summary.inner.weight"] @ block
        return weight[f"{name}_summary.outer.weight"] @ (inner * (1 + torch.erf(inner / math.sqrt(2))) / 2)

    def attend(h: int, i: int, q: Tensor, keys: list[Tensor], values: list[Tensor], key_positions: list[int]) -> tuple:
        weights = softmax(
            [float(q @ k) / math.sqrt(dim) + bias(h, i, j) for k, j in zip(keys, key_positions, strict=True)]
        )
        return sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros(dim, dtype=x.dtype)), weights

    q = (x @ weight["q_proj.weight"].T).unflatten(-1, (heads, dim))
    k, v = ((x @ weight[f"{n}_proj.weight"].T).unflatten(-1, (3, kv_heads, dim)) for n in "kv")
    gates = (x @ weight["branch_proj.weight"].T).sigmoid().unflatten(-1, (3, heads))
    out = torch.zeros(len(x), heads, dim, dtype=x.dtype)
    for i in range(len(x)):
        starts = list(range(0, i - spec.length + 2, spec.stride))  # of the complete compressed blocks
        for g in range(kv_heads):
            blocks = [(k[s : s + spec.length, 0, g], v[s : s + spec.length, 0, g]) for s in starts]
            keys, values = [summary("k", key) for key, _ in blocks], [summary("v", value) for _, value in blocks]
            scores = [0.0] * (i // spec.block + 1)
            for h in range(g * groups, (g + 1) * groups):
                ends = [s + spec.length - 1 for s in starts]
                compressed, weights = attend(h, i, q[i, h], keys, values, ends)
                out[i, h] += gates[i, 0, h] * compressed
                for w, s in zip(weights, starts, strict=True):
                    for position in range(s, s + spec.length):
                        if position // spec.block < len(scores):
                            scores[position // spec.block] += w / spec.stride
            always_chosen = {0, len(scores) - 1, max(len(scores) - 2, 0)}
            others = sorted(set(range(len(scores))) - always_chosen, key=lambda j: (-scores[j], j))  # noqa: B023
            chosen = [*always_chosen, *others][: spec.select]
            selected = [j for j in range(i + 1) if j // spec.block in chosen]
            in_window = list(range(max(0, i - spec.window + 1), i + 1))
            for h in range(g * groups, (g + 1) * groups):
                for branch, key_positions in ((1, selected), (2, in_window)):
                    keys = [rotate(k[j, branch, g], j) for j in key_positions]
                    values = [v[j, branch, g] for j in key_positions]
                    out[i, h] += gates[i, branch, h] * attend(h, i, rotate(q[i, h], i), keys, values, key_positions)[0]
    return out.flatten(1) @ weight["o_proj.weight"].T


@pytest.mark.ledger("sp.native")
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_equation_in_plain_loops(name: str, layout_name: str) -> None:
    spec, x, layout = SPECS[name], random(2, LENGTH, WIDTH, seed=99), LAYOUTS[layout_name]
    module = build(spec)
    found = module(x, layout)
    assert found.shape == x.shape
    for row in range(2):
        segments = torch.zeros(LENGTH) if layout.segments is None else layout.segments[row]
        valid = torch.ones(LENGTH, dtype=torch.bool) if layout.valid is None else layout.valid[row]
        for segment in segments.unique():
            document = (segments == segment) & valid
            assert (found[row, document] - plain_loop(module, spec, x[row, document])).abs().max() < 1e-12


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_gradients_equal_finite_differences(name: str, layout_name: str) -> None:
    module, x, layout = build(SPECS[name]), random(2, LENGTH, WIDTH, seed=99).requires_grad_(), LAYOUTS[layout_name]
    parameters, valid = dict(module.named_parameters()), 1 if layout.valid is None else layout.valid.unsqueeze(-1)

    def as_function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x, layout)) * valid

    assert gradcheck(as_function, (x, *parameters.values()), fast_mode=True)


def test_output_does_not_depend_on_the_order_of_slots() -> None:
    """Only documents and positions matter: if the tokens of each document are shuffled, each has the same output."""
    module, x, layout = build(SPECS["grouped, rope"]), random(2, LENGTH, WIDTH), packed_and_padded()
    noise = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0))
    order = (layout.segments + noise).argsort(1)
    shuffled = TokenLayout(*(field.gather(1, order) for field in (layout.positions, layout.segments, layout.valid)))
    rows = torch.arange(2).unsqueeze(1)
    found, expected = module(x[rows, order], shuffled), module(x, layout)[rows, order]
    assert (found - expected)[shuffled.valid].abs().max() < 1e-12


def test_keys_are_sorted_by_document_and_position() -> None:
    keys = sort_keys(packed_and_padded())
    assert keys.starts[0].tolist() == [0] * 9 + [9] + [10] * 13
    assert keys.query_indices[0].tolist() == [*range(9), 0, *range(13)]
    assert keys.slots[1].tolist() == [*range(4, LENGTH), *range(4)]  # padding comes last
    assert keys.query_indices[1, 4:].tolist() == [*range(LENGTH - 4)]
    cached = sort_keys(TokenLayout(torch.tensor([[5], [2]])).with_keys(torch.arange(8).expand(2, 8)))
    assert (cached.starts.tolist(), cached.query_indices.tolist()) == ([[0], [0]], [[5], [2]])


def test_importance_equals_the_double_sum_of_the_paper() -> None:
    """p_slc[j] = Σ_{m < l'/d} Σ_{n < l/d} p_cmp[(l'/d) j + m - n]"""
    length, stride, block, count = 8, 2, 6, 4
    starts = torch.arange(0, 17, stride)
    p = random(1, 2, 3, len(starts)).softmax(-1)
    found = importance(p, starts.unsqueeze(0), length, stride, block, count)
    expected = torch.zeros(1, 2, 3, count, dtype=torch.float64)
    for j in range(count):
        for m in range(block // stride):
            for n in range(length // stride):
                i = block // stride * j + m - n
                if 0 <= i < len(starts):
                    expected[..., j] += p[..., i]
    assert torch.allclose(found, expected)


def test_the_choice_is_causal_and_prefers_the_earlier_of_equal_blocks() -> None:
    """The first block, the query's own and the previous one are always chosen, then the best; later blocks never."""
    scores = torch.tensor([0.0, 0.5, 0.2, 0.5, 0.2, 0.1, 9.0, 9.0]).expand(1, 1, 5, 8)
    query_positions = torch.tensor([[0, 4, 11, 20, 23]])  # in blocks of 4: 0, 1, 2, 5, 5
    chosen = choose_blocks(scores, query_positions, 4, 5)[0, 0]
    assert [set(row.tolist()) & set(range(query_positions[0, i] // 4 + 1)) for i, row in enumerate(chosen)] == [
        {0}, {0, 1}, {0, 1, 2}, {0, 4, 5, 1, 3}, {0, 4, 5, 1, 3},
    ]  # fmt: skip
    assert choose_blocks(scores, query_positions, 4, 4)[0, 0, 4].tolist() == [0, 4, 5, 1]  # 1 and 3 tie


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_with_all_blocks_chosen_equals_full_attention(length: int) -> None:
    layout, block = TokenLayout.whole(2, length), 8
    count = -(-length // block)
    q, k, v = random(2, 4, length, 6), random(2, 2, length, 6, seed=1), random(2, 2, length, 5, seed=2)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    chosen = torch.arange(count).expand(2, 2, length, count)
    found = attend_to_blocks(q, k, v, layout, sort_keys(layout), chosen, block, 0.4, None)
    expected = reference.attend(q, k, v, layout, ScoreOptions(Causal(), 0.4))
    assert (found - expected).abs().max() < 1e-12
    for f, e in zip(*(torch.autograd.grad(y.sin().sum(), tensors) for y in (found, expected)), strict=True):
        assert (f - e).abs().max() < 1e-12


def test_keys_of_chosen_blocks_are_gathered_in_chunks() -> None:
    """Forward and backward: the largest tensor does not grow with the square of the length."""
    sizes = []
    for length in (512, 1024):
        layout, chosen = TokenLayout.whole(1, length), torch.arange(3).expand(1, 1, length, 3)
        q, k, v = (random(1, heads, length, 4).requires_grad_() for heads in (2, 1, 1))
        with LargestTensor() as largest:
            attend_to_blocks(q, k, v, layout, sort_keys(layout), chosen, 8, 0.5, None).sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[1] < 1024 * 1024 / 16


def test_every_weight_has_a_gradient() -> None:
    module = build(SPECS["grouped, rope"])
    module(random(2, LENGTH, WIDTH), TokenLayout.whole(2, LENGTH)).sin().sum().backward()
    assert all(parameter.grad.abs().max() > 1e-6 for parameter in module.parameters())


@pytest.mark.parametrize("tokens", [7, 32])
def test_flops_equal_the_counted_flops(tokens: int) -> None:
    spec = replace(SPECS["grouped, rope"], window=64)  # no pair is masked: the reference computes masked pairs too
    module = build(spec)
    use_backend(module, "reference")
    with FlopCounterMode(display=False) as counter:
        module(random(1, tokens, WIDTH), TokenLayout.whole(1, tokens))
    assert counter.get_total_flops() == spec.flops(WIDTH, tokens, tokens)


def test_a_decoding_step_at_64k_tokens_needs_less_than_an_eighth_of_the_flops() -> None:
    """The paper's sizes at 64k tokens: 64 heads in groups of 16, keys of 192."""
    sparse, full = NativeSparse(64, 4, 192), Attention(64, 4, 192)
    pairs = [spec.flops(2560, 1, 65536) - spec.flops(2560, 1, 0) for spec in (sparse, full)]
    assert pairs[0] < pairs[1] / 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 3}, "choose one of 1, 2, 4"),
        ({"stride": 0}, "stride=0 must be positive"),
        ({"length": 24}, "length=24 must be a positive multiple of stride=16"),
        ({"block": 40}, "block=40 must be a positive multiple of stride=16"),
        ({"select": 2}, "select=2 must be at least 3"),
        ({"window": 0}, "window=0 must be positive"),
    ],
)
def test_invalid_specs_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        NativeSparse(4, **fields)
