"""Folding: a row of n tokens becomes blocks of queries, and beside each block lie the few keys that it can see.

    keys of block b = [ band: b·c - before … (b+1)·c + after | shared | linked blocks ]

so that one batched product over blocks does the work of a sparse n × n one: O(n·w) instead of O(n²). A fold only says
where to look; the mask decides each pair. With a step, tokens that far apart are gathered first, and the same done to
each gathering.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SHORTEST, LONGEST = 16, 128  # queries a block: shorter makes thin products, longer computes more than a window sees
LINE = 16  # numbers of a line of the cache: rows of scores that begin with one multiply faster


@dataclass(frozen=True)
class BlockLayout:
    block: int  # queries side by side
    before: int = 0  # keys in front of the block's first query
    after: int = 0  # and behind its last
    shared: tuple[int, ...] = ()  # slots of keys that every block can see
    links: tuple[tuple[int, ...], ...] = ()  # of each block, further blocks that it can see, outside band and shared
    whole: int = 0  # so many queries at the front see everything
    step: int = 1

    @property
    def band(self) -> int:
        return self.before + self.block + self.after

    @property
    def linked(self) -> int:
        """The most links that a block has."""
        return max(map(len, self.links), default=0)

    @property
    def keys(self) -> int:
        """How many lie beside each block."""
        return self.band + len(self.shared) + self.linked * self.block

    def blocks(self, length: int) -> int:
        return -(-length // self.block)

    def pairs(self, length: int) -> int:
        """Products of a query and a key that are computed."""
        gathered = -(-length // self.step)
        return self.step * self.blocks(gathered) * self.block * self.keys + self.whole * length

    def near(self, q: Tensor, k: Tensor) -> Tensor:
        """Does the key's slot lie in the band of the query's block?"""
        start = q // self.block * self.block - self.before
        return (k >= start) & (k < start + self.band)


def block_for(reach: int) -> int:
    """How many queries to take together that see so many keys beside their own: about a quarter, a power of two."""
    return min(max(1 << round(math.log2(max(reach, 4) / 4)), SHORTEST), LONGEST)


@lru_cache(maxsize=64)
def links_of(fold: BlockLayout, count: int) -> Tensor:
    """(links, N): of each block its n-th link, or the empty block behind the last."""
    rows = [*fold.links, *[()] * (count - len(fold.links))]
    return torch.tensor([[row[n] if n < len(row) else count for row in rows] for n in range(fold.linked)])


class DenseBlock(NamedTuple):
    """Some queries and the keys that they can see, as slots of the row."""

    queries: range
    keys: tuple[range, ...]  # apart from each other, in their order

    @property
    def pairs(self) -> int:
        return len(self.queries) * sum(map(len, self.keys))


@lru_cache(maxsize=64)
def blocks_of(fold: BlockLayout, length: int) -> tuple[DenseBlock, ...]:
    """The fold as blocks, each with no more keys than it needs; first the queries that see everything."""
    c = fold.block if fold.links else fold.block * max(1, LONGEST // fold.block)  # neighbours share what they see
    everything, step = (range(length),), fold.step
    blocks = [DenseBlock(range(i, min(i + c, fold.whole)), everything) for i in range(0, fold.whole, c)]
    for n in range(step):
        last = -(-(length - n) // step)  # of this gathering
        for b, start in enumerate(range(0, last, c)):
            stop = min(start + c, last)
            spans = [(max(0, start - fold.before) // LINE * LINE, min(stop + fold.after, last))]
            spans += [(slot, slot + 1) for slot in fold.shared]
            links = fold.links[b] if b < len(fold.links) else ()
            spans += [(link * c, min(link * c + c, last)) for link in links]
            queries = range(max(start, fold.whole), stop)
            if queries:
                keys = (range(n + i * step, n + j * step, step) for i, j in merged(spans))
                blocks.append(DenseBlock(range(n + queries.start * step, n + stop * step, step), tuple(keys)))
    return tuple(blocks)


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same slots, in order, each once."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            start, stop = found[-1][0], max(stop, found.pop()[1])
        found.append((start, stop))
    return found


def apart(x: Tensor, step: int, fill: float = 0) -> tuple[Tensor, ...]:
    """(A, n, E) -> for each of the first `step` tokens, it and those that follow it in steps: (A, n / step, E)"""
    if step == 1:
        return (x,)
    x = F.pad(x, (0, 0, 0, -x.shape[1] % step), value=fill)
    return x.unflatten(1, (-1, step)).unbind(2)


def together(parts: list[Tensor], length: int) -> Tensor:
    """The inverse of `apart`."""
    return torch.stack(parts, 2).flatten(1, 2)[:, :length] if len(parts) > 1 else parts[0]


def query_blocks(x: Tensor, fold: BlockLayout, fill: float = 0) -> Tensor:
    """(A, n, E) -> (N, A, c, E)"""
    if short := -x.shape[1] % fold.block:  # to pad by nothing, or to cut it off again, would copy
        x = F.pad(x, (0, 0, 0, short), value=fill)
    return x.unflatten(1, (-1, fold.block)).transpose(0, 1)


def unblock(x: Tensor, length: int) -> Tensor:
    """(N, A, c, E) -> (A, n, E)"""
    x = x.transpose(0, 1).flatten(1, 2)
    return x if x.shape[1] == length else x[:, :length]


def with_margins(x: Tensor, fold: BlockLayout, fill: float = 0) -> Tensor:
    """(A, n, E) -> a row with room for the outer bands and an empty block for missing links, then the shared keys."""
    reach = -(-fold.band // fold.block) * fold.block - fold.block - fold.before  # `after`, up to a whole block
    behind = fold.blocks(x.shape[1]) * fold.block - x.shape[1] + max(reach, fold.block if fold.links else 0)
    margins = [x.new_full((len(x), size, x.shape[2]), fill) for size in (fold.before, behind)]
    row = [margins[0], x, margins[1]]
    if fold.shared:
        row.append(x.index_select(1, torch.tensor(fold.shared, dtype=torch.int64, device=x.device)))
    return torch.cat(row, 1)


def key_blocks(row: Tensor, fold: BlockLayout, first: int, last: int, count: int) -> Tensor:
    """Beside blocks first … last of `count`, their keys: (N, A, keys, E); a view where a fold is nothing but bands."""
    c, band, shared = fold.block, fold.band, len(fold.shared)
    near = row[:, first * c :].unfold(1, band, c)[:, : last - first].permute(1, 0, 3, 2)
    if fold.keys == band:
        return near
    keys = row.new_empty(last - first, len(row), fold.keys, row.shape[2])
    keys[:, :, :band] = near
    keys[:, :, band : band + shared] = row[:, row.shape[1] - shared :]
    if fold.linked:
        blocks = row[:, fold.before : fold.before + (count + 1) * c].unflatten(1, (-1, c))
        for n, link in enumerate(links_of(fold, count)[:, first:last].to(row.device)):
            start = band + shared + n * c
            keys[:, :, start : start + c] = blocks[:, link].transpose(0, 1)
    return keys


class KeyBlocks(torch.autograd.Function):
    """`key_blocks`, and the row handed on to the next portion of blocks.

    The gradient comes back the same way: carried from portion to portion, each adds its own to it in place.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, fold: BlockLayout, first: int, last: int, count: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.fold, ctx.blocks = row.shape, fold, (first, last, count)
        return key_blocks(row, fold, first, last, count), row.view_as(row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, carried: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return carried, None, None, None, None
        fold, (first, last, count) = ctx.fold, ctx.blocks
        c, band, shared = fold.block, fold.band, len(fold.shared)
        total = carried
        if total is None:  # laid out as the kernel lays its gradients out, token after token
            heads, length, width = ctx.shape
            total = gradient.new_zeros(length, heads, width).transpose(0, 1)
        near, front, linked = gradient.transpose(0, 1).split([band, shared, fold.linked * c], 2)  # (A, N, …, E)
        for start in range(0, band, c):
            piece = near[:, :, start : start + c]
            # No unfold: torch.compile's functional form of a write into one forgets what lies between its windows.
            beside = total[:, first * c + start : last * c + start].unflatten(1, (-1, c))
            beside[:, :, : piece.shape[2]] += piece
        if fold.shared:
            total[:, total.shape[1] - shared :] += front.sum(1)
        if fold.linked:
            blocks = total[:, fold.before : fold.before + (count + 1) * c].unflatten(1, (-1, c))
            for n, link in enumerate(links_of(fold, count)[:, first:last].to(total.device)):
                blocks.index_add_(1, link, linked[:, :, n * c : (n + 1) * c])
        return total, None, None, None, None
