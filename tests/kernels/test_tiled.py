"""Tiled attention: equal results for any tiles in any order, O(n) saved elements, and attention statistics."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from regard.kernels.attention import backend, reference, tiled
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.online_softmax import PartialSoftmax, empty_partial, partial_softmax
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.statistics import RunningArgmax, attend_with_statistics
from regard.layout import TokenLayout
from tests.kernels.cases import EXTRAS, LAYOUTS, LENGTH, MASKS, inputs, options_of, with_gradients

TILES = [pytest.param((1, 1), marks=pytest.mark.slow), (2, 3), (5, 7), (16, 8), (37, 37), (64, 64)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.ledger("flash.tiled", "flash.exact", "eng.fused")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("mask", ["causal", "full", "window", "bigbird", "longformer"])
def test_tiles_of_any_size_equal_the_reference(mask: str, tile: tuple[int, int]) -> None:
    for layout in ("ordered", "packed and padded", "one query"):
        tensors = inputs("grouped-query", LAYOUTS[layout], torch.float64)
        options = options_of(MASKS[mask], "buckets", "capped, sinks", torch.float64)
        found = with_gradients(
            lambda *arguments: tiled.attend(*arguments, tile=tile), tensors, LAYOUTS[layout], options
        )
        expected = with_gradients(reference.attend, tensors, LAYOUTS[layout], options)
        assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))


@pytest.mark.ledger("flash.exact")
def test_tiles_are_as_accurate_as_the_reference() -> None:
    """In float32, against float64: at most twice the error of the reference plus one unit in the last place."""
    layout, options = TokenLayout.whole(1, 300), ScoreOptions(Causal(), 0.25)
    q, k, v = (2 * random(1, 2, 300, 16, seed=seed) for seed in range(3))
    exact = reference.attend(q, k, v, layout, options)
    errors = [
        (backend(name)(q.float(), k.float(), v.float(), layout, options) - exact).abs().max().item()
        for name in ("tiled", "reference")
    ]
    assert errors[0] <= 2 * errors[1] + torch.finfo(torch.float32).eps * exact.abs().max().item()


@pytest.mark.ledger("flash.backward", "attn.backward")
@pytest.mark.parametrize("extra", EXTRAS)
def test_gradcheck_of_the_backward(extra: str) -> None:
    layout = LAYOUTS["packed and padded"]
    tokens = slice(0, 9)
    short_layout = TokenLayout(layout.positions[:, tokens], layout.segments[:, tokens], layout.valid[:, tokens])
    tensors = inputs("grouped-query", short_layout, torch.float64, value_dim=3)
    base = options_of(MASKS["window"], None, extra, torch.float64)
    sinks = [] if base.sinks is None else [base.sinks]

    def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        options = ScoreOptions(base.mask, base.scale, None, base.softcap, *sinks)
        return tiled.attend(q, k, v, short_layout, options, tile=(4, 5))

    assert torch.autograd.gradcheck(attend, (*tensors, *sinks), fast_mode=True)


@pytest.mark.ledger("flash.backward")
def test_backward_saves_no_weights() -> None:
    def saved_elements(attend, n: int) -> int:
        total = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel()
            return x

        tensors = [random(1, 2, n, 8).requires_grad_() for _ in range(3)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attend(*tensors, TokenLayout.whole(1, n), ScoreOptions(Causal()))
        return total

    for n in (64, 128):
        assert saved_elements(tiled.attend, n) == 2 * n * (4 * 8 + 1)  # q, k, v, out and one log-sum per query
        assert saved_elements(reference.attend, n) > 2 * n * n


@pytest.mark.ledger("flash.online")
def test_partial_results_merge_in_any_partition_and_order() -> None:
    s, v = 20 * random(3, 12), random(12, 4)
    whole = (s.softmax(-1) @ v, s.logsumexp(-1, keepdim=True))
    for cuts in ([12], [1, 11], [5, 3, 4], [2, 2, 2, 6]):
        parts = [partial_softmax(a, b) for a, b in zip(s.split(cuts, -1), v.split(cuts), strict=True)]
        for order in permutations(parts):
            merged = empty_partial(s, 4)
            for part in order:
                merged = merged.merge(part)
            assert (merged.out() - whole[0]).abs().max() < 1e-13
            assert (merged.log_sum() - whole[1]).abs().max() < 1e-13


@pytest.mark.ledger("flash.online")
def test_merge_is_associative() -> None:
    a, b, c = (partial_softmax(30 * random(3, 5, seed=n), random(5, 2, seed=n + 3)) for n in range(3))
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    for name in ("m", "l", "o"):
        assert (getattr(left, name) - getattr(right, name)).abs().max() < 1e-14
    empty = PartialSoftmax(
        torch.full_like(a.m, torch.finfo(a.m.dtype).min / 2), torch.zeros_like(a.l), torch.zeros_like(a.o)
    )
    assert all(torch.equal(getattr(a.merge(empty), name), getattr(a, name)) for name in ("m", "l", "o"))


@pytest.mark.ledger("sp.block", "flash.tiled")
def test_tiles_without_allowed_pairs_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    scored_tiles = []
    score = tiled.score
    monkeypatch.setattr(tiled, "score", lambda *arguments: scored_tiles.append(arguments[4:6]) or score(*arguments))
    q = random(1, 1, 32, 4)
    for mask, tiles in [(Causal(), 36), (Window(4), 15), (BlockSparse(4, ((0,), (0, 1), (2,), (1, 3))), 10)]:
        scored_tiles.clear()
        tiled.attend(q, q, q, TokenLayout.whole(1, 32), ScoreOptions(mask), tile=(4, 4))
        assert len(scored_tiles) == tiles


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", ["causal", "full", "window", "bigbird"])
@pytest.mark.parametrize("layout", ["ordered", "packed and padded", "one query"])
def test_statistics_equal_those_of_the_weight_matrix(layout: str, mask: str, extra: str) -> None:
    q, k, v = inputs("grouped-query", LAYOUTS[layout], torch.float64)
    options = options_of(MASKS[mask], "slopes", extra, torch.float64)
    out, found = attend_with_statistics(q, k, v, LAYOUTS[layout], options, first_tokens=2, tile=(16, 8))
    weights = reference.attention_weights(q, k, LAYOUTS[layout], options)  # (B, H, L, S)
    assert (out - reference.attend(q, k, v, LAYOUTS[layout], options)).abs().max() < 1e-12
    assert (found.entropy - torch.special.entr(weights).sum(-1)).abs().max() < 1e-12
    first_keys = (LAYOUTS[layout].key_positions < 2).view(2, 1, 1, -1)
    assert (found.first_weight - (weights * first_keys).sum(-1)).abs().max() < 1e-12
    assert (found.top_weight - weights.amax(-1)).abs().max() < 1e-12
    without_key = weights.sum(-1) == 0
    assert torch.equal(found.top_key, weights.argmax(-1).masked_fill(without_key, -1))
    assert not found.entropy[without_key].any()


def test_entropy_is_zero_for_one_hot_and_log_n_for_uniform_weights() -> None:
    n = 24
    q, equal_keys = torch.eye(n).view(1, 1, n, n), torch.zeros(1, 1, n, n)
    one_hot = attend_with_statistics(q, q, q, TokenLayout.whole(1, n), ScoreOptions(MASKS["full"], 200.0))[1]
    assert one_hot.entropy.abs().max() < 1e-6
    assert torch.equal(one_hot.top_key[0, 0], torch.arange(n))
    uniform = attend_with_statistics(q, equal_keys, q, TokenLayout.whole(1, n), ScoreOptions(MASKS["full"]))[1]
    assert (uniform.entropy - torch.tensor(n).log()).abs().max() < 1e-6
    assert (uniform.first_weight - 1 / n).abs().max() < 1e-6


@pytest.mark.parametrize("tile", [1, 16, 37, 64, 200])
@pytest.mark.parametrize("width", [1, 8, 30])
def test_running_argmax_equals_argmax(width: int, tile: int) -> None:
    s = random(2, 3, 5, 200).mul(3).round()  # many equal scores, of which argmax chooses the first
    s[:, 1, 2] = torch.finfo(s.dtype).min  # no allowed key
    running = RunningArgmax(s[..., :4], width)
    for start in range(0, 200, tile):
        found = running.update(s[..., start : start + tile], start)
        assert torch.equal(found, s[..., start : start + tile].amax(-1, keepdim=True))
    expected = s.argmax(-1, keepdim=True)
    expected[:, 1, 2] = -1
    assert torch.equal(running.key(), expected)


def test_dropout_is_refused() -> None:
    tensors = inputs("multi-head", LAYOUTS["ordered"], torch.float64)
    with pytest.raises(ValueError, match="'tiled': tiled has no dropout; choose another backend, or auto"):
        backend("tiled")(*tensors, TokenLayout.whole(2, LENGTH), ScoreOptions(Causal(), dropout=0.1))
