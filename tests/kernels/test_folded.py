"""Folded attention: gradients, portions, and work and memory that grow with n·w, not with n²."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from regard.kernels.attention import backend, block_layout, block_sparse, block_sparse_cpu, reference, sdpa
from regard.kernels.attention.bias import Slopes
from regard.kernels.attention.block_layout import (
    BlockLayout,
    KeyBlocks,
    blocks_of,
    links_of,
    query_blocks,
    unblock,
    with_margins,
)
from regard.kernels.attention.mask import Mask
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.sparse_transformer import StridedPattern
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.score_options import ScoreOptions
from regard.layout import TokenLayout
from tests.kernels.cases import AT, DIM, HEADS, LAYOUT, MASKS, inputs, scores_of, with_gradients

FOLDS = {
    "band": BlockLayout(4, before=5, after=2),
    "aligned band": BlockLayout(4, before=8),
    "shared": BlockLayout(4, before=3, shared=(0, 1, 9)),
    "links": BlockLayout(4, links=((2,), (), (0, 3), (1,))),
    "all": BlockLayout(4, before=4, after=4, shared=(0, 1), links=((3,), (3,), (), ())),
}


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("length", [13, 16])
def test_keys_lie_where_the_fold_says(name: str, length: int) -> None:
    block_layout, x = FOLDS[name], torch.arange(1.0, length + 1).view(1, -1, 1)
    count = block_layout.blocks(length)
    keys, row = KeyBlocks.apply(with_margins(x, block_layout), block_layout, 0, count, count)
    assert keys.shape == (count, 1, block_layout.keys, 1)
    for b in range(count):
        slots = [*range(b * 4 - block_layout.before, b * 4 + 4 + block_layout.after), *block_layout.shared]
        for n in range(block_layout.linked):
            link = block_layout.links[b][n] if n < len(block_layout.links[b]) else count
            slots += range(link * 4, link * 4 + 4)
        assert keys[b].flatten().tolist() == [slot + 1 if 0 <= slot < length else 0 for slot in slots]
    assert torch.equal(unblock(query_blocks(x, block_layout), length), x)
    assert links_of(block_layout, count).shape == (block_layout.linked, count) or not block_layout.linked


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("at_once", [1, 3, 4])
def test_the_gradient_of_a_key_is_the_sum_over_its_blocks(name: str, at_once: int) -> None:
    block_layout, length = FOLDS[name], 13

    def laid(x: torch.Tensor) -> torch.Tensor:
        row, portions, count = with_margins(x, block_layout), [], block_layout.blocks(length)
        for first in range(0, count, at_once):
            keys, row = KeyBlocks.apply(row, block_layout, first, min(first + at_once, count), count)
            portions.append(keys)
        return torch.cat(portions)

    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(laid, x)


@pytest.mark.parametrize("mask", ["window", "dilated", "sinks and window", "longformer", "bigbird", "block-sparse"])
def test_portions_change_nothing(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs("grouped-query", AT["ordered"], torch.float64)
    scores = scores_of(MASKS[mask], None, "", torch.float64)
    whole = with_gradients(block_sparse.attend, tensors, TokenLayout.whole(2, 37), scores)
    monkeypatch.setattr(block_sparse, "PORTION", 1)  # a block at a time
    pieces = with_gradients(block_sparse.attend, tensors, TokenLayout.whole(2, 37), scores)
    assert all((a - b).abs().max() < 1e-13 for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize(
    "mask",
    [BigBird(4, 3, 2, 1, length=64), BigBird(2, 1, 3, 2, length=64), Longformer(2, 4), Longformer(1, 16)],
    ids=str,
)
def test_texts_of_any_length_beside_tokens_that_see_everything(mask: Mask) -> None:
    for length in range(1, 40):
        layout, generator = TokenLayout.whole(1, length), torch.Generator().manual_seed(length)
        shape = (1, 2, length, 4)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
        found, expected = (
            with_gradients(f, tensors, layout, ScoreOptions(mask)) for f in (block_sparse.attend, reference.attend)
        )
        assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))


@pytest.fixture
def blockwise_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Short texts go block by block too, in several blocks; says of every call whether it did."""
    found, suits = [], block_sparse_cpu.suits
    monkeypatch.setattr(block_sparse_cpu, "WORTH", 0)
    monkeypatch.setattr(block_sparse_cpu, "PORTION", 300)  # less than all heads of a block
    monkeypatch.setattr(block_layout, "LONGEST", 8)
    monkeypatch.setattr(block_layout, "LINE", 4)
    monkeypatch.setattr(block_sparse_cpu, "suits", lambda *given: found.append(suits(*given)) or found[-1])
    blocks_of.cache_clear()
    block_sparse.folds_of.cache_clear()
    yield found
    blocks_of.cache_clear()
    block_sparse.folds_of.cache_clear()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", [name for name, mask in MASKS.items() if len(mask.folds(37)) == 1])
def test_block_by_block_is_the_reference(name: str, heads: str, blockwise_here: list[bool]) -> None:
    for layout in AT.values():
        layout = replace(layout)
        tensors = inputs(heads, layout, torch.float64, value=DIM)
        scores = scores_of(MASKS[name], None, "", torch.float64)
        if block_sparse.refuses(*tensors, layout, scores) is None:
            found, expected = (
                with_gradients(f, tensors, layout, scores) for f in (block_sparse.attend, reference.attend)
            )
            assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))
    assert blockwise_here and all(blockwise_here)


@pytest.mark.parametrize("name", ["window", "dilated", "longformer", "bigbird"])
def test_block_by_block_gradients(name: str, blockwise_here: list[bool]) -> None:
    layout, scores = TokenLayout.whole(1, 21), ScoreOptions(MASKS[name], 0.7)
    shapes = [(1, 21, 4, 3), (1, 21, 2, 3), (1, 21, 2, 3)]  # token after token, as projections write them
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return block_sparse.attend(*(x.transpose(1, 2) for x in tensors), layout, scores)

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)
    for n in range(3):  # a gradient for one of them alone
        alone = [x if i == n else x.detach() for i, x in enumerate(tensors)]
        (found,) = torch.autograd.grad(attend(*alone).sum(), tensors[n])
        assert torch.equal(found, torch.autograd.grad(attend(*tensors).sum(), tensors[n])[0])
    with torch.no_grad():
        assert torch.equal(attend(*tensors), torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False))
    assert all(blockwise_here)


def test_block_by_block_in_float32() -> None:
    """Long enough to go that way by itself; against float64 no worse than twice PyTorch's own kernel."""
    for mask in (Window(100), Longformer(100, 16), BigBird(64, 3, 2, 3, length=1024)):
        layout, scores = TokenLayout.whole(1, 1024), ScoreOptions(mask, 0.125)
        tensors = [torch.randn(1, 8, 1024, 64, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        single = [x.detach().float().requires_grad_() for x in tensors]
        assert block_sparse_cpu.suits(*single, scores, mask.folds(1024)[0])
        exact = with_gradients(reference.attend, tensors, layout, scores)
        found, plain = (with_gradients(f, single, layout, scores) for f in (block_sparse.attend, sdpa.attend))
        for e, f, p in zip(exact, found, plain, strict=True):
            ulp = torch.finfo(torch.float32).eps * e.abs().max()
            assert (f - e).abs().max() <= 2 * (p - e).abs().max() + ulp


def test_what_does_not_go_block_by_block(blockwise_here: list[bool]) -> None:
    tensors, layout, mask = (
        inputs("multi-head", AT["ordered"], torch.float32, value=DIM),
        TokenLayout.whole(2, 37),
        MASKS["window"],
    )
    slopes = Slopes(torch.ones(4))
    wider = inputs("multi-head", AT["ordered"], torch.float32, value=2 * DIM)
    for given, scores in [
        (tensors, ScoreOptions(mask, dropout=0.5)),
        (tensors, ScoreOptions(mask, bias=slopes)),
        (wider, ScoreOptions(mask)),
    ]:
        block_sparse.attend(*given, layout, scores)
    with torch.autocast("cpu", torch.bfloat16):
        assert block_sparse.attend(*tensors, layout, ScoreOptions(mask)).dtype == torch.bfloat16
    assert len(blockwise_here) == 5 and not any(blockwise_here)  # a bias goes row by row


def test_blocks_have_every_key_once_and_all_that_are_seen() -> None:
    for mask in MASKS.values():
        for length in (1, 7, 16, 37):
            folds = mask.folds(length)
            if len(folds) != 1:
                continue
            blocks, slots = blocks_of(folds[0], length), torch.arange(length)
            assert sorted(slot for block in blocks for slot in block.queries) == slots.tolist()
            for queries, runs in blocks:
                keys = [slot for run in runs for slot in run]
                assert keys == sorted(set(keys))
                seen = mask.allows(torch.tensor([*queries]).unsqueeze(1), slots)
                assert seen is None or set(seen.any(0).nonzero().flatten().tolist()) <= set(keys)


@pytest.mark.ledger("sp.window")
@pytest.mark.parametrize("w", [63, 64, 65])
def test_long_windows_at_their_edges(w: int) -> None:
    """Long enough that blocks in the middle share one mask."""
    layout, n = TokenLayout.whole(1, 700), 700
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, n, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    for mask in (Window(w), Window(w, causal=False)):
        found, expected = (
            with_gradients(f, tensors, layout, ScoreOptions(mask)) for f in (block_sparse.attend, reference.attend)
        )
        assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))


@pytest.mark.ledger("sp.window", "sp.block")
def test_work_grows_with_what_is_seen() -> None:
    assert block_sparse.pairs(Window(256), 8192) <= 8192 * (256 + 128)
    assert block_sparse.pairs(Window(256), 16384) == 2 * block_sparse.pairs(Window(256), 8192)
    assert block_sparse.pairs(Longformer(256, 16), 4096) <= 4096 * (2 * 256 + 16 + 128) + 16 * 4096
    assert block_sparse.pairs(BigBird(64, 3, 2, 3), 4096) == 4096 * 8 * 64 + 128 * 4096
    assert block_sparse.pairs(BlockSparse(4, LAYOUT), 32) == 8 * 4 * 3 * 4  # its own block and at most two others
    assert block_sparse.pairs(StridedPattern(64), 4096) <= 3.1 * 4096**1.5


@pytest.mark.ledger("sp.window")
def test_memory_grows_with_the_window_not_the_length() -> None:
    """The numbers that the backward keeps, n = 1024 and 2048, w = 32, against the n² of the weights."""

    def kept(attend, n: int) -> int:
        total = 0

        def pack(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += x.untyped_storage().nbytes() // x.element_size()
            return x

        tensors = [torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attend(*tensors, TokenLayout.whole(1, n), ScoreOptions(Window(32)))
        return total

    one, two = kept(block_sparse.attend, 1024), kept(block_sparse.attend, 2048)
    assert two < 2.2 * one
    assert two * 10 < kept(reference.attend, 2048)


def test_dropout_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in inputs("multi-head", AT["ordered"], torch.float64))
    for extra in ("", "sinks"):
        base = scores_of(MASKS["window"], None, extra, torch.float64)
        some = ScoreOptions(base.mask, base.scale, softcap=base.softcap, sinks=base.sinks, dropout=0.5)
        torch.manual_seed(0)
        mean = torch.stack(
            [block_sparse.attend(q, k, v, TokenLayout.whole(2, 37), some).detach() for _ in range(400)]
        ).mean(0)
        assert (mean - block_sparse.attend(q, k, v, TokenLayout.whole(2, 37), base)).abs().mean() < 0.05


def test_what_cannot_be_folded_is_refused() -> None:
    tensors = inputs("multi-head", AT["any documents"], torch.float64)
    with pytest.raises(ValueError, match=r"'folded': folded needs consecutive texts for Window; choose"):
        backend("block_sparse")(*tensors, AT["any documents"], ScoreOptions(MASKS["window"]))
    with pytest.raises(ValueError, match="folded needs whole texts for Longformer"):
        backend("block_sparse")(*tensors, AT["packed"], ScoreOptions(MASKS["longformer"]))


@pytest.mark.filterwarnings("ignore:.*lru_cache.*")  # the compiler traces through the cache, and says so
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.11's own tracing
def test_compiled_gradients_are_the_eager_ones() -> None:
    """Writes into an unfolded view once came out of the compiler with holes between the windows."""
    attend = backend("block_sparse")

    def gradients(run) -> list[torch.Tensor]:
        torch.manual_seed(0)
        tensors = [torch.randn(1, 2, 100, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        return torch.autograd.grad(run(*tensors).square().sum(), tensors)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, TokenLayout.whole(1, 100), ScoreOptions(Window(5)))

    for found, expected in zip(gradients(torch.compile(plain, backend="aot_eager")), gradients(plain), strict=True):
        assert (found - expected).abs().max() < 1e-12
