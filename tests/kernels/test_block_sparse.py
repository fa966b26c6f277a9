"""Block-sparse attention equals the reference, in portions and on CPUs; work and memory grow with n·w, not n²."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from regard.kernels.attention import backend, block_layout, block_sparse, block_sparse_cpu, reference, sdpa
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.kernels.attention.bias import Slopes
from regard.kernels.attention.block_layout import (
    BlockLayout,
    GatherKeyBlocks,
    dense_blocks,
    link_table,
    merge_blocks,
    pad_keys,
    split_blocks,
)
from regard.kernels.attention.mask import Mask
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.sparse_transformer import StridedPattern
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from tests.kernels.cases import BLOCK_TABLE, DIM, HEADS, LAYOUTS, MASKS, inputs, options_of, with_gradients

BLOCK_LAYOUTS = {
    "band": BlockLayout(4, before=5, after=2),
    "aligned band": BlockLayout(4, before=8),
    "global keys": BlockLayout(4, before=3, global_keys=(0, 1, 9)),
    "links": BlockLayout(4, links=((2,), (), (0, 3), (1,))),
    "all": BlockLayout(4, before=4, after=4, global_keys=(0, 1), links=((3,), (3,), (), ())),
}


@pytest.mark.parametrize("name", BLOCK_LAYOUTS)
@pytest.mark.parametrize("length", [13, 16])
def test_gathered_keys_are_those_of_the_layout(name: str, length: int) -> None:
    layout, x = BLOCK_LAYOUTS[name], torch.arange(1.0, length + 1).view(1, -1, 1)
    count = layout.count(length)
    keys, row = GatherKeyBlocks.apply(pad_keys(x, layout), layout, 0, count, count)
    assert keys.shape == (count, 1, layout.keys_per_block, 1)
    for b in range(count):
        slots = [*range(b * 4 - layout.before, b * 4 + 4 + layout.after), *layout.global_keys]
        for n in range(layout.max_links):
            link = layout.links[b][n] if n < len(layout.links[b]) else count
            slots += range(link * 4, link * 4 + 4)
        assert keys[b].flatten().tolist() == [slot + 1 if 0 <= slot < length else 0 for slot in slots]
    assert torch.equal(merge_blocks(split_blocks(x, layout), length), x)
    assert link_table(layout, count).shape == (layout.max_links, count) or not layout.max_links


@pytest.mark.parametrize("name", BLOCK_LAYOUTS)
@pytest.mark.parametrize("blocks_per_gather", [1, 3, 4])
def test_gradient_of_a_key_is_the_sum_over_its_blocks(name: str, blocks_per_gather: int) -> None:
    layout, length = BLOCK_LAYOUTS[name], 13

    def gather(x: torch.Tensor) -> torch.Tensor:
        row, portions, count = pad_keys(x, layout), [], layout.count(length)
        for first in range(0, count, blocks_per_gather):
            keys, row = GatherKeyBlocks.apply(row, layout, first, min(first + blocks_per_gather, count), count)
            portions.append(keys)
        return torch.cat(portions)

    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gather, x)


@pytest.mark.parametrize("mask", ["window", "dilated", "sinks and window", "longformer", "bigbird", "block-sparse"])
def test_portions_do_not_change_the_result(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs("grouped-query", LAYOUTS["ordered"], torch.float64)
    options = options_of(MASKS[mask], None, "", torch.float64)
    whole = with_gradients(block_sparse.attend, tensors, TokenLayout.whole(2, 37), options)
    monkeypatch.setattr(block_sparse, "PORTION", 1)  # one block at a time
    portions = with_gradients(block_sparse.attend, tensors, TokenLayout.whole(2, 37), options)
    assert all((a - b).abs().max() < 1e-13 for a, b in zip(whole, portions, strict=True))


@pytest.mark.parametrize(
    "mask",
    [BigBird(4, 3, 2, 1, length=64), BigBird(2, 1, 3, 2, length=64), Longformer(2, 4), Longformer(1, 16)],
    ids=str,
)
def test_dense_queries_of_any_length_equal_the_reference(mask: Mask) -> None:
    for length in range(1, 40):
        layout, generator = TokenLayout.whole(1, length), torch.Generator().manual_seed(length)
        shape = (1, 2, length, 4)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
        found, expected = (
            with_gradients(f, tensors, layout, ScoreOptions(mask)) for f in (block_sparse.attend, reference.attend)
        )
        assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))


@pytest.fixture
def used_cpu_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Allows block_sparse_cpu for short sequences, in several blocks; returns the list of results of `is_suitable`."""
    results, is_suitable = [], block_sparse_cpu.is_suitable
    monkeypatch.setattr(block_sparse_cpu, "MIN_SCORES", 0)
    monkeypatch.setattr(block_sparse_cpu, "PORTION", 300)  # less than all heads of a block
    monkeypatch.setattr(block_layout, "MAX_BLOCK", 8)
    monkeypatch.setattr(block_layout, "CACHE_LINE", 4)
    monkeypatch.setattr(
        block_sparse_cpu, "is_suitable", lambda *arguments: results.append(is_suitable(*arguments)) or results[-1]
    )
    dense_blocks.cache_clear()
    block_sparse.block_layouts.cache_clear()
    yield results
    dense_blocks.cache_clear()
    block_sparse.block_layouts.cache_clear()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", [name for name, mask in MASKS.items() if len(mask.block_layouts(37)) == 1])
def test_cpu_path_equals_the_reference(name: str, heads: str, used_cpu_path: list[bool]) -> None:
    for layout in LAYOUTS.values():
        layout = replace(layout)
        tensors = inputs(heads, layout, torch.float64, value_dim=DIM)
        options = options_of(MASKS[name], None, "", torch.float64)
        if block_sparse.unsupported_reason(describe(*tensors, layout, options)) is None:
            found, expected = (
                with_gradients(f, tensors, layout, options) for f in (block_sparse.attend, reference.attend)
            )
            assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))
    assert used_cpu_path and all(used_cpu_path)


@pytest.mark.parametrize("name", ["window", "dilated", "longformer", "bigbird"])
def test_gradcheck_of_the_cpu_path(name: str, used_cpu_path: list[bool]) -> None:
    layout, options = TokenLayout.whole(1, 21), ScoreOptions(MASKS[name], 0.7)
    shapes = [(1, 21, 4, 3), (1, 21, 2, 3), (1, 21, 2, 3)]  # in the memory order of projections
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return block_sparse.attend(*(x.transpose(1, 2) for x in tensors), layout, options)

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)
    for n in range(3):  # only one tensor requires a gradient
        one_requires_grad = [x if i == n else x.detach() for i, x in enumerate(tensors)]
        (found,) = torch.autograd.grad(attend(*one_requires_grad).sum(), tensors[n])
        assert torch.equal(found, torch.autograd.grad(attend(*tensors).sum(), tensors[n])[0])
    with torch.no_grad():
        assert torch.equal(attend(*tensors), torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False))
    assert all(used_cpu_path)


def test_cpu_path_is_accurate_in_float32() -> None:
    """Long sequences use the CPU path; their error against float64 is at most twice that of PyTorch's kernel."""
    for mask in (Window(100), Longformer(100, 16), BigBird(64, 3, 2, 3, length=1024)):
        layout, options = TokenLayout.whole(1, 1024), ScoreOptions(mask, 0.125)
        tensors = [torch.randn(1, 8, 1024, 64, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        in_float32 = [x.detach().float().requires_grad_() for x in tensors]
        assert block_sparse_cpu.is_suitable(*in_float32, options, mask.block_layouts(1024)[0])
        expected = with_gradients(reference.attend, tensors, layout, options)
        found, of_pytorch = (with_gradients(f, in_float32, layout, options) for f in (block_sparse.attend, sdpa.attend))
        for e, f, p in zip(expected, found, of_pytorch, strict=True):
            ulp = torch.finfo(torch.float32).eps * e.abs().max()
            assert (f - e).abs().max() <= 2 * (p - e).abs().max() + ulp


def test_unsuitable_arguments_do_not_use_the_cpu_path(used_cpu_path: list[bool]) -> None:
    tensors, layout, mask = (
        inputs("multi-head", LAYOUTS["ordered"], torch.float32, value_dim=DIM),
        TokenLayout.whole(2, 37),
        MASKS["window"],
    )
    slopes = Slopes(torch.ones(4))
    values_of_another_dim = inputs("multi-head", LAYOUTS["ordered"], torch.float32, value_dim=2 * DIM)
    for arguments, options in [
        (tensors, ScoreOptions(mask, dropout=0.5)),
        (tensors, ScoreOptions(mask, bias=slopes)),
        (values_of_another_dim, ScoreOptions(mask)),
    ]:
        block_sparse.attend(*arguments, layout, options)
    with torch.autocast("cpu", torch.bfloat16):
        assert block_sparse.attend(*tensors, layout, ScoreOptions(mask)).dtype == torch.bfloat16
    assert len(used_cpu_path) == 5 and not any(used_cpu_path)  # with a bias there is one call per row


def test_dense_blocks_contain_all_allowed_keys_once() -> None:
    for mask in MASKS.values():
        for length in (1, 7, 16, 37):
            layouts = mask.block_layouts(length)
            if len(layouts) != 1:
                continue
            blocks, slots = dense_blocks(layouts[0], length), torch.arange(length)
            assert sorted(slot for block in blocks for slot in block.queries) == slots.tolist()
            for queries, runs in blocks:
                keys = [slot for run in runs for slot in run]
                assert keys == sorted(set(keys))
                allowed = mask.allows(torch.tensor([*queries]).unsqueeze(1), slots)
                assert allowed is None or set(allowed.any(0).nonzero().flatten().tolist()) <= set(keys)


@pytest.mark.ledger("sp.window")
@pytest.mark.parametrize("w", [63, 64, 65])
def test_long_windows_equal_the_reference(w: int) -> None:
    """The sequences are long enough that the inner blocks share one mask."""
    layout, n = TokenLayout.whole(1, 700), 700
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, n, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    for mask in (Window(w), Window(w, causal=False)):
        found, expected = (
            with_gradients(f, tensors, layout, ScoreOptions(mask)) for f in (block_sparse.attend, reference.attend)
        )
        assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))


@pytest.mark.ledger("sp.window", "sp.block")
def test_computed_pairs_grow_with_the_allowed_pairs() -> None:
    assert block_sparse.pairs(Window(256), 8192) <= 8192 * (256 + 128)
    assert block_sparse.pairs(Window(256), 16384) == 2 * block_sparse.pairs(Window(256), 8192)
    assert block_sparse.pairs(Longformer(256, 16), 4096) <= 4096 * (2 * 256 + 16 + 128) + 16 * 4096
    assert block_sparse.pairs(BigBird(64, 3, 2, 3), 4096) == 4096 * 8 * 64 + 128 * 4096
    assert block_sparse.pairs(BlockSparse(4, BLOCK_TABLE), 32) == 8 * 4 * 3 * 4  # its own block and at most two others
    assert block_sparse.pairs(StridedPattern(64), 4096) <= 3.1 * 4096**1.5


@pytest.mark.ledger("sp.window")
def test_memory_grows_linearly_with_the_length() -> None:
    """Elements saved for the backward for n = 1024 and 2048 and w = 32, compared with the n² weights."""

    def saved_elements(attend, n: int) -> int:
        total = 0

        def pack(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += x.untyped_storage().nbytes() // x.element_size()
            return x

        tensors = [torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attend(*tensors, TokenLayout.whole(1, n), ScoreOptions(Window(32)))
        return total

    shorter, longer = saved_elements(block_sparse.attend, 1024), saved_elements(block_sparse.attend, 2048)
    assert longer < 2.2 * shorter
    assert longer * 10 < saved_elements(reference.attend, 2048)


def test_dropout_keeps_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in inputs("multi-head", LAYOUTS["ordered"], torch.float64))
    for extra in ("", "sinks"):
        without_dropout = options_of(MASKS["window"], None, extra, torch.float64)
        with_dropout = replace(without_dropout, dropout=0.5)
        torch.manual_seed(0)
        mean = torch.stack(
            [block_sparse.attend(q, k, v, TokenLayout.whole(2, 37), with_dropout).detach() for _ in range(400)]
        ).mean(0)
        assert (mean - block_sparse.attend(q, k, v, TokenLayout.whole(2, 37), without_dropout)).abs().mean() < 0.05


def test_unsupported_layouts_are_refused() -> None:
    tensors = inputs("multi-head", LAYOUTS["documents, not consecutive"], torch.float64)
    with pytest.raises(ValueError, match=r"'block_sparse': block_sparse needs consecutive tokens for Window; choose"):
        backend("block_sparse")(*tensors, LAYOUTS["documents, not consecutive"], ScoreOptions(MASKS["window"]))
    with pytest.raises(ValueError, match="block_sparse needs whole sequences for Longformer"):
        backend("block_sparse")(*tensors, LAYOUTS["packed"], ScoreOptions(MASKS["longformer"]))


@pytest.mark.filterwarnings("ignore:.*lru_cache.*")  # torch.compile warns that it traces through the cache
# From the tracing of torch 2.11:
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_gradients_equal_eager_ones() -> None:
    """torch.compile once lost elements between the windows of an in-place write into an unfolded view."""
    attend = backend("block_sparse")

    def gradients(run) -> list[torch.Tensor]:
        torch.manual_seed(0)
        tensors = [torch.randn(1, 2, 100, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        return torch.autograd.grad(run(*tensors).square().sum(), tensors)

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, TokenLayout.whole(1, 100), ScoreOptions(Window(5)))

    for found, expected in zip(gradients(torch.compile(eager, backend="aot_eager")), gradients(eager), strict=True):
        assert (found - expected).abs().max() < 1e-12
