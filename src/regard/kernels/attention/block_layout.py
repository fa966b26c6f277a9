"""Block-sparse attention: the queries of a row in blocks, and for each block the keys that it may attend to.

    keys of block b = [ band: b·c - before … (b+1)·c + after | global keys | linked blocks ]

One batched product over blocks replaces a sparse n × n product: O(n·w) instead of O(n²). The layout contains every
allowed pair and some others, which the mask excludes. With a stride s > 1 (dilated patterns) the tokens n, n + s, … of
each n < s form a separate group, and each group is divided into blocks.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MIN_BLOCK, MAX_BLOCK = 16, 128  # queries: smaller blocks make thin products, larger ones compute many masked pairs
CACHE_LINE = 16  # float32 numbers; products are faster if the keys of a block start at a cache line


@dataclass(frozen=True)
class BlockLayout:
    block: int  # queries per block
    before: int = 0  # keys before the first query of a block
    after: int = 0  # keys after its last query
    global_keys: tuple[int, ...] = ()  # slots of the keys that every block gathers
    links: tuple[tuple[int, ...], ...] = ()  # per block, further key blocks, outside its band and the global keys
    dense_queries: int = 0  # the number of first queries that attend to all keys
    stride: int = 1

    @property
    def band(self) -> int:
        return self.before + self.block + self.after

    @property
    def max_links(self) -> int:
        return max([0, *map(len, self.links)])  # torch 2.11 cannot compile max(…, default=0)

    @property
    def keys_per_block(self) -> int:
        return self.band + len(self.global_keys) + self.max_links * self.block

    def count(self, length: int) -> int:
        """The number of blocks of a group of this many tokens."""
        return -(-length // self.block)

    def pairs(self, length: int) -> int:
        """The number of pairs of a query and a key whose score is computed."""
        group = -(-length // self.stride)
        blocks = self.stride * self.count(group)
        return blocks * self.block * self.keys_per_block + self.dense_queries * length

    def in_band(self, q: Tensor, k: Tensor) -> Tensor:
        """Whether the slot of the key is in the band of the query's block."""
        start = q // self.block * self.block - self.before
        return (k >= start) & (k < start + self.band)


def block_size(neighbours: int) -> int:
    """Queries per block: a power of two, about a quarter of the window of this many keys beside the query."""
    return min(max(1 << round(math.log2(max(neighbours, 4) / 4)), MIN_BLOCK), MAX_BLOCK)


@lru_cache(maxsize=64)
def link_table(layout: BlockLayout, count: int) -> Tensor:
    """(max_links, N): the n-th link of each block, or `count`, the index of an empty block, where it has fewer."""
    rows = [*layout.links, *[()] * (count - len(layout.links))]
    return torch.tensor([[row[n] if n < len(row) else count for row in rows] for n in range(layout.max_links)])


class DenseBlock(NamedTuple):
    """A block of queries and exactly the keys that it needs, as slots of the row."""

    queries: range
    keys: tuple[range, ...]  # disjoint and ascending

    @property
    def pairs(self) -> int:
        return len(self.queries) * sum(map(len, self.keys))


@lru_cache(maxsize=64)
def dense_blocks(layout: BlockLayout, length: int) -> tuple[DenseBlock, ...]:
    """The layout as blocks without padding; the dense queries come first."""
    # Without links neighbouring blocks have most keys in common, so several are merged into one.
    c = layout.block if layout.links else layout.block * max(1, MAX_BLOCK // layout.block)
    all_keys, stride, dense = (range(length),), layout.stride, layout.dense_queries
    blocks = [DenseBlock(range(i, min(i + c, dense)), all_keys) for i in range(0, dense, c)]
    for n in range(stride):
        group_length = -(-(length - n) // stride)
        for b, start in enumerate(range(0, group_length, c)):
            stop = min(start + c, group_length)
            spans = [(max(0, start - layout.before) // CACHE_LINE * CACHE_LINE, min(stop + layout.after, group_length))]
            spans += [(slot, slot + 1) for slot in layout.global_keys]
            links = layout.links[b] if b < len(layout.links) else ()
            spans += [(link * c, min(link * c + c, group_length)) for link in links]
            queries = range(max(start, dense), stop)
            if queries:
                keys = (range(n + i * stride, n + j * stride, stride) for i, j in merge_spans(spans))
                blocks.append(DenseBlock(range(n + queries.start * stride, n + stop * stride, stride), tuple(keys)))
    return tuple(blocks)


def merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same slots as disjoint, ascending spans."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            start, stop = result[-1][0], max(stop, result.pop()[1])
        result.append((start, stop))
    return result


def split_groups(x: Tensor, stride: int, fill: float = 0) -> tuple[Tensor, ...]:
    """(A, n, E) -> the strided groups, (A, n / stride, E) each: tokens 0, stride, 2 · stride …; 1, stride + 1, …"""
    if stride == 1:
        return (x,)
    x = F.pad(x, (0, 0, 0, -x.shape[1] % stride), value=fill)
    return x.unflatten(1, (-1, stride)).unbind(2)


def merge_groups(groups: list[Tensor], length: int) -> Tensor:
    """The inverse of `split_groups`."""
    return torch.stack(groups, 2).flatten(1, 2)[:, :length] if len(groups) > 1 else groups[0]


def split_blocks(x: Tensor, layout: BlockLayout, fill: float = 0) -> Tensor:
    """(A, n, E) -> (N, A, c, E)"""
    if padding := -x.shape[1] % layout.block:  # padding by nothing would copy
        x = F.pad(x, (0, 0, 0, padding), value=fill)
    return x.unflatten(1, (-1, layout.block)).transpose(0, 1)


def merge_blocks(x: Tensor, length: int) -> Tensor:
    """(N, A, c, E) -> (A, n, E), the inverse of `split_blocks`."""
    x = x.transpose(0, 1).flatten(1, 2)
    return x if x.shape[1] == length else x[:, :length]


def pad_keys(x: Tensor, layout: BlockLayout, fill: float = 0) -> Tensor:
    """(A, n, E) -> the padded row, followed by its global keys.

    The padding completes the bands of the first and last blocks, and contains the empty block of missing links.
    """
    after = -(-layout.band // layout.block) * layout.block - layout.block - layout.before  # `after` in whole blocks
    blocks = layout.count(x.shape[1]) * layout.block
    right = blocks - x.shape[1] + max(after, layout.block if layout.links else 0)
    padding = [x.new_full((len(x), size, x.shape[2]), fill) for size in (layout.before, right)]
    row = [padding[0], x, padding[1]]
    if layout.global_keys:
        row.append(x.index_select(1, torch.tensor(layout.global_keys, dtype=torch.int64, device=x.device)))
    return torch.cat(row, 1)


def gather_key_blocks(row: Tensor, layout: BlockLayout, first: int, last: int, count: int) -> Tensor:
    """The keys of blocks first … last - 1 of `count`, (N, A, keys, E); a view if the layout consists of a band only."""
    c, band, global_count = layout.block, layout.band, len(layout.global_keys)
    in_band = row[:, first * c :].unfold(1, band, c)[:, : last - first].permute(1, 0, 3, 2)
    if layout.keys_per_block == band:
        return in_band
    keys = row.new_empty(last - first, len(row), layout.keys_per_block, row.shape[2])
    keys[:, :, :band] = in_band
    keys[:, :, band : band + global_count] = row[:, row.shape[1] - global_count :]
    if layout.max_links:
        blocks = row[:, layout.before : layout.before + (count + 1) * c].unflatten(1, (-1, c))
        for n, link in enumerate(link_table(layout, count)[:, first:last].to(row.device)):
            start = band + global_count + n * c
            keys[:, :, start : start + c] = blocks[:, link].transpose(0, 1)
    return keys


class GatherKeyBlocks(torch.autograd.Function):
    """The keys of `gather_key_blocks`, and the row itself, which is the input of the next portion of blocks.

    The backward passes the gradient of the row from portion to portion, and each adds its gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, layout: BlockLayout, first: int, last: int, count: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.layout, ctx.blocks = row.shape, layout, (first, last, count)
        return gather_key_blocks(row, layout, first, last, count), row.view_as(row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_keys: Tensor | None, d_row: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_keys is None:
            return d_row, None, None, None, None
        layout, (first, last, count) = ctx.layout, ctx.blocks
        c, band, global_count = layout.block, layout.band, len(layout.global_keys)
        if d_row is None:  # in the memory order of the kernel's gradients: token after token
            heads, length, width = ctx.shape
            d_row = d_keys.new_zeros(length, heads, width).transpose(0, 1)
        sizes = [band, global_count, layout.max_links * c]
        d_band, d_global, d_linked = d_keys.transpose(0, 1).split(sizes, 2)  # (A, N, …)
        for start in range(0, band, c):
            part = d_band[:, :, start : start + c]
            # No unfold: torch.compile loses the elements between the windows of an unfolded tensor that is written to.
            target = d_row[:, first * c + start : last * c + start].unflatten(1, (-1, c))
            target[:, :, : part.shape[2]] += part
        if layout.global_keys:
            d_row[:, d_row.shape[1] - global_count :] += d_global.sum(1)
        if layout.max_links:
            blocks = d_row[:, layout.before : layout.before + (count + 1) * c].unflatten(1, (-1, c))
            for n, link in enumerate(link_table(layout, count)[:, first:last].to(d_row.device)):
                blocks.index_add_(1, link, d_linked[:, :, n * c : (n + 1) * c])
        return d_row, None, None, None, None
