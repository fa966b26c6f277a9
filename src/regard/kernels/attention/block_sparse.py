"""Sparse attention in the memory that its pattern needs: blocks of queries, each before the keys that it can see.

The pattern's folds (fold.py) lay the keys beside the blocks; the mask decides every pair from true positions, documents
and padding, as it does everywhere. A window of w costs O(n·w) time and memory, forward and backward. Blocks go through
PyTorch's fused kernel, on a CPU large ones one after the other (blockwise.py); where scores are capped, have sinks, or
come from two folds (near and far keys), they are joined in one softmax of plain tensor algebra. Folds speak of slots in
a row, so positions must follow from slots: in whole texts, and for masks of distance also in packed and padded ones.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.attention import block_sparse_cpu, reference, sdpa
from regard.kernels.attention.bias import Bias
from regard.kernels.attention.block_layout import (
    BlockLayout,
    DenseBlock,
    KeyBlocks,
    apart,
    blocks_of,
    key_blocks,
    query_blocks,
    together,
    unblock,
    with_margins,
)
from regard.kernels.attention.mask import Mask
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.autocast import without_autocast
from regard.layout import TokenLayout

PORTION = 1 << 21  # numbers of keys laid out at once: few enough to stay near the processor


def refuses(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    mask, name = scores.mask, type(scores.mask).__name__
    if type(mask).folds is Mask.folds:
        return f"folded has nothing to fold: {name} sees too much"
    if layout.keys is not None:
        return "folded needs keys that are the queries; here others stand in front"
    if not (layout.ordered or layout.consecutive and mask.relative):
        return f"folded needs {'consecutive' if mask.relative else 'whole'} texts for {name}"
    return None


def slower(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    computed, all_pairs = pairs(scores.mask, q.shape[2]), q.shape[2] ** 2
    if 2 * computed > all_pairs:
        return f"folded would save little: {computed} of {all_pairs} pairs"
    return None


def pairs(mask: Mask, length: int) -> int:
    """How many products of a query and a key this backend computes; blockwise.py may round blocks up."""
    return sum(fold.pairs(length) for fold in folds_of(mask, length))


@lru_cache(maxsize=256)
def folds_of(mask: Mask, length: int) -> tuple[BlockLayout, ...]:
    return mask.folds(length)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    if len(q) == 1 or layout.ordered and scores.bias is None:  # one mask serves all rows
        return attend_rows(q, k, v, QueryRows(layout, 0, scores.mask), scores)
    parts = zip(q.split(1), k.split(1), v.split(1), strict=True)
    return torch.cat(
        [attend_rows(*part, QueryRows(layout, row, scores.mask), scores) for row, part in enumerate(parts)]
    )


def attend_rows(q: Tensor, k: Tensor, v: Tensor, rows: "QueryRows", scores: ScoreOptions) -> Tensor:
    folds = folds_of(scores.mask, q.shape[2])
    plain = len(folds) > 1 or scores.softcap is not None or scores.sinks is not None
    if not plain and block_sparse_cpu.suits(q, k, v, scores, folds[0]):
        seen = rows.beside(k.shape[1], q.shape[1] // k.shape[1], q.dtype)
        return block_sparse_cpu.attend(q, k, v, blocks_of(folds[0], q.shape[2]), seen, scores.scale)
    whole, block = folds[0].whole, folds[0].block
    if 0 < whole < q.shape[2] and whole % block == 0 and not plain:  # whole blocks: they need not be folded as well
        front, rest = q.split([whole, q.shape[2] - whole], 2)
        out = fused(rest, k, v, rows, scores, folds[0], whole // block)
    else:
        out = joined(q, k, v, rows, scores, folds) if plain else fused(q, k, v, rows, scores, folds[0])
        if not whole:
            return out
        front, out = q[:, :, :whole], out[:, :, whole:]
    positions = rows.layout.positions[: len(q)]
    layout = TokenLayout(positions[:, :whole]).with_keys(positions)
    dense = sdpa if sdpa.refuses(q, k, v, layout, scores) is None else reference
    return torch.cat([dense.attend(front, k, v, layout, scores), out], 2)


def fused(
    q: Tensor, k: Tensor, v: Tensor, rows: "QueryRows", scores: ScoreOptions, fold: BlockLayout, skipped: int = 0
) -> Tensor:
    """One fold, its blocks through PyTorch's kernel; the heads of a group are more queries of their key head.

    So many blocks of queries in front may be `skipped`: q begins behind them.
    """
    groups, outs = q.shape[1] // k.shape[1], []
    at_once = max(1, PORTION // (k[:, :, 0].numel() * fold.keys))
    for n, (q_n, k_n, v_n) in enumerate(zip(*(apart(x.flatten(0, 1), fold.step) for x in (q, k, v)), strict=True)):
        queries = query_blocks(q_n, fold).unflatten(1, (-1, groups)).flatten(2, 3)  # (N, B·K, G·c, E)
        k_row, v_row, done = with_margins(k_n, fold), with_margins(v_n, fold), []
        count = fold.blocks(k_n.shape[1])
        for first, some in zip(range(skipped, count, at_once), queries.split(at_once), strict=True):
            last = first + len(some)
            keys, k_row = KeyBlocks.apply(k_row, fold, first, last, count)
            values, v_row = KeyBlocks.apply(v_row, fold, first, last, count)
            extra = rows.additive(fold, n, first, last, scores.bias, groups, q.dtype)
            out = F.scaled_dot_product_attention(some, keys, values, extra, scores.dropout, scale=scores.scale)
            done.append(out.transpose(1, 2))  # (N, G·c, B·K, Ev), as the kernel wrote it
        out = torch.cat(done).unflatten(1, (groups, -1)).permute(0, 3, 1, 2, 4)  # (N, B·K, G, c, Ev)
        outs.append(unblock(out.flatten(1, 2), q_n.shape[1]))  # (B·H, n, Ev)
    return together(outs, q.shape[2]).unflatten(0, q.shape[:2])


def joined(
    q: Tensor, k: Tensor, v: Tensor, rows: "QueryRows", scores: ScoreOptions, folds: tuple[BlockLayout, ...]
) -> Tensor:
    """The scores of all folds side by side, (B, H, L, keys of all folds), and one softmax over them."""
    shape, dtype, wide = q.shape, q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (reference.per_head(x, q).to(wide).flatten(0, 1) for x in (q, k, v))  # (B·H, n, E)
    with without_autocast(q.device):
        s, seen = zip(*(rows.scores(q, k, scores, folds, n) for n in range(len(folds))), strict=True)
        weights = reference.normalize(
            torch.cat(s, -1).unflatten(0, shape[:2]), torch.cat(seen, -1).unsqueeze(0), scores.sinks
        )
        weights = F.dropout(weights, scores.dropout).flatten(0, 1).split([fold.keys for fold in folds], -1)
        out = torch.stack([blend(w, v, fold) for w, fold in zip(weights, folds, strict=True)]).sum(0)
    return out.unflatten(0, shape[:2]).to(dtype)  # (B, H, L, Ev)


def blend(weights: Tensor, v: Tensor, fold: BlockLayout) -> Tensor:
    """(A, n, keys) and values (A, n, Ev) -> (A, n, Ev)"""
    outs = [
        unblock(query_blocks(w_n, fold) @ all_blocks(v_n, fold), v_n.shape[1])
        for w_n, v_n in zip(apart(weights, fold.step), apart(v, fold.step), strict=True)
    ]
    return together(outs, v.shape[1])


def all_blocks(x: Tensor, fold: BlockLayout) -> Tensor:
    """(A, n, E) -> (N, A, keys, E)"""
    count = fold.blocks(x.shape[1])
    return KeyBlocks.apply(with_margins(x, fold), fold, 0, count, count)[0]


@dataclass(frozen=True, eq=False)
class QueryRows:
    """One row of the batch, or all of them if they are alike: what stands in its slots, and so who sees whom."""

    layout: TokenLayout
    row: int
    mask: Mask

    def seen(self, q: Tensor, k: Tensor) -> Tensor:
        return allowed_pairs(self.layout, self.row, self.mask, q, k)

    def additive(
        self, fold: BlockLayout, n: int, first: int, last: int, bias: Bias | None, groups: int, dtype: torch.dtype
    ) -> Tensor:
        """(N, 1 or K, G·c, keys) for these blocks: 0 or the bias where a pair is seen, else -∞."""
        q, k = self.layout.derived(block_slots, fold, n)
        start, end = first * fold.block - fold.before, last * fold.block + fold.after
        alike = self.layout.ordered and self.mask.relative
        if alike and start >= 0 and end <= self.layout.positions.shape[1] // fold.step:
            last = first + 1  # in the middle of a text all blocks look alike to a mask of distance
        made = slice(first, last) if alike else slice(0, len(q))  # otherwise all are made at once, for all portions
        extra = self.layout.derived(block_mask, self.row, self.mask, fold, n, made.start, made.stop, groups, dtype)
        extra = extra[first - made.start : last - made.start]
        q, k = q[first:last], k[first:last]
        if bias is None:
            return extra
        positions = self.layout.positions[self.row]
        tile = bias.tile(positions[q.squeeze(2)], positions[k.squeeze(1)], dtype)  # (N, H, c, keys)
        return extra + tile.unflatten(1, (-1, groups)).flatten(2, 3)

    def beside(self, heads: int, groups: int, dtype: torch.dtype) -> block_sparse_cpu.Seen:
        """The same for blocks as they are, not laid out: `heads` key heads that serve `groups` heads each."""
        alike = self.layout.ordered and self.mask.relative

        def find(block: DenseBlock) -> tuple[Tensor | None, Tensor | None]:
            block = from_first(block) if alike else block  # for a mask of distances most blocks are the same
            return self.layout.derived(dense_mask, self.row, self.mask, block, heads, groups, dtype)

        return find

    def scores(
        self, q: Tensor, k: Tensor, scores: ScoreOptions, folds: tuple[BlockLayout, ...], number: int
    ) -> tuple[Tensor, Tensor]:
        """Of one fold, scores (A, n, keys) and whether they are seen (1, n, keys), here and in no earlier fold."""
        fold, s, seen = folds[number], [], []
        for n, (q_n, k_n) in enumerate(zip(apart(q, fold.step), apart(k, fold.step), strict=True)):
            q_slots, k_slots = self.layout.derived(block_slots, fold, n)
            tile = query_blocks(q_n, fold) @ all_blocks(k_n, fold).transpose(-1, -2) * scores.scale  # (N, A, c, keys)
            if scores.softcap is not None:
                tile = scores.softcap * torch.tanh(tile / scores.softcap)
            if scores.bias is not None:
                positions = self.layout.positions[self.row]
                tile = tile + scores.bias.tile(positions[q_slots.squeeze(2)], positions[k_slots.squeeze(1)], q.dtype)
            here = self.seen(q_slots, k_slots)
            for earlier in folds[:number]:
                here = here & ~earlier.near(q_slots, k_slots)
            s.append(unblock(tile, q_n.shape[1]))
            seen.append(unblock(here.unsqueeze(1), q_n.shape[1]))
        return together(s, q.shape[1]), together(seen, q.shape[1])


def block_slots(layout: TokenLayout, blocks: BlockLayout, n: int) -> tuple[Tensor, Tensor]:
    """Slots n, n + step, …: those of each block's queries (N, c, 1) and keys (N, 1, keys); -1: no token."""
    slots = torch.arange(layout.positions.shape[1], dtype=torch.int32, device=layout.positions.device)
    slots = apart(slots.view(1, -1, 1), blocks.step, -1)[n]
    count, band = blocks.blocks(slots.shape[1]), blocks.band
    k = key_blocks(with_margins(slots, blocks, -1), blocks, 0, count, count)[:, 0].transpose(1, 2)
    start = torch.arange(count, device=k.device).view(-1, 1, 1) * blocks.block - blocks.before
    twice = (k[:, :, band:] >= start) & (k[:, :, band:] < start + band)  # these are in the band already
    k = torch.cat([k[:, :, :band], k[:, :, band:].masked_fill(twice, -1)], 2)
    return query_blocks(slots, blocks, -1)[:, 0], k


def allowed_pairs(layout: TokenLayout, row: int, mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """Slots (N, c, 1) and (N, 1, keys) -> (N, c, keys), True where the query attends to the key."""
    positions = layout.positions[row].int()
    allowed = mask.allows(positions[q], positions[k])
    seen = k >= 0 if allowed is None else allowed & (k >= 0)
    if layout.segments is not None:
        seen = seen & (layout.segments[row][q] == layout.segments[row][k])
    return seen if layout.valid is None else seen & layout.valid[row][k]


def block_mask(
    layout: TokenLayout, row: int, mask: Mask, blocks: BlockLayout, n: int, start: int, stop: int, groups: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """(N, 1, G·c, keys) for the blocks from start to stop: 0 where the query attends to the key, else -∞."""
    q, k = layout.derived(block_slots, blocks, n)
    seen = allowed_pairs(layout, row, mask, q[start:stop], k[start:stop]).repeat(1, groups, 1)
    return torch.where(seen, 0.0, float("-inf")).to(dtype).unsqueeze(1)


def dense_mask(
    layout: TokenLayout, row: int, mask: Mask, block: DenseBlock, heads: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask (K, G·c, keys) of a block, and its queries without any key; None: nothing to mask.

    In an ordered layout positions are slots, so a block may be counted from its first query.
    """
    q, k = slots_of(block.queries).unsqueeze(1), slots_of(*block.keys)
    if layout.ordered:
        seen = mask.allows(q, k)
        if seen is None:
            return None, None
    else:
        seen = allowed_pairs(layout, row, mask, q, k)
    seen = seen.repeat(groups, 1)
    if seen.all():
        return None, None
    blind = ~seen.any(-1, keepdim=True)
    extra = torch.where(seen, 0.0, float("-inf")).to(dtype).expand(heads, -1, -1)
    return extra, blind if blind.any() else None


def slots_of(*runs: range) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, run.step) for run in runs])


def from_first(block: DenseBlock) -> DenseBlock:
    """Its slots counted from its first query."""
    first = block.queries.start
    queries, *keys = (range(run.start - first, run.stop - first, run.step) for run in (block.queries, *block.keys))
    return DenseBlock(queries, tuple(keys))
