"""Block-sparse attention in the memory that the pattern needs: blocks of queries with the keys that they may attend to.

The mask's block layouts (block_layout.py) list the keys of each block; the mask itself decides every pair from
positions, documents and validity. A window of w costs O(n·w) time and memory, forward and backward. Blocks run through
PyTorch's fused kernel, and large ones on a CPU one after the other (block_sparse_cpu.py). Scores that are capped, have
sinks or come from two layouts (near and far keys) go through one softmax in plain tensor algebra. A block layout refers
to slots of a row, so slots must determine positions: whole sequences qualify, and for relative masks packed rows too.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.attention import block_sparse_cpu, reference, sdpa
from regard.kernels.attention.arguments import AttentionCall, ScoreOptions, describe
from regard.kernels.attention.block_layout import (
    BlockLayout,
    DenseBlock,
    GatherKeyBlocks,
    dense_blocks,
    gather_key_blocks,
    merge_blocks,
    merge_groups,
    pad_keys,
    split_blocks,
    split_groups,
)
from regard.kernels.attention.mask import Mask
from regard.kernels.autocast import without_autocast
from regard.layout import Bias, TokenLayout

PORTION = 1 << 21  # numbers in the keys gathered at once: few enough to stay in the processor's cache


def unsupported_reason(call: AttentionCall) -> str | None:
    mask, name = call.mask, type(call.mask).__name__
    if type(mask).block_layouts is Mask.block_layouts:
        return f"block_sparse needs a sparse mask; {name} has no block layout"
    if not call.own_keys:
        return "block_sparse needs the queries' own tokens as keys; here the keys come from a cache or a source"
    if not (call.ordered or call.consecutive and mask.relative):
        return f"block_sparse needs {'consecutive tokens' if mask.relative else 'whole sequences'} for {name}"
    return None


def slower_reason(call: AttentionCall) -> str | None:
    length = call.q[2]
    computed, all_pairs = pairs(call.mask, length), length**2
    if 2 * computed > all_pairs:
        return f"block_sparse would save little: {computed} of {all_pairs} pairs"
    return None


def pairs(mask: Mask, length: int) -> int:
    """The number of pairs whose score this backend computes; block_sparse_cpu.py may round blocks up."""
    return sum(blocks.pairs(length) for blocks in block_layouts(mask, length))


@lru_cache(maxsize=256)
def block_layouts(mask: Mask, length: int) -> tuple[BlockLayout, ...]:
    return mask.block_layouts(length)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    if len(q) == 1 or layout.ordered and options.bias is None:  # all rows have the same mask
        return attend_rows(q, k, v, RowMask(layout, 0, options.mask), options)
    rows = zip(q.split(1), k.split(1), v.split(1), strict=True)
    return torch.cat([attend_rows(*row, RowMask(layout, b, options.mask), options) for b, row in enumerate(rows)])


def attend_rows(q: Tensor, k: Tensor, v: Tensor, row_mask: "RowMask", options: ScoreOptions) -> Tensor:
    layouts, length = block_layouts(options.mask, q.shape[2]), q.shape[2]
    merged = len(layouts) > 1 or options.softcap is not None or options.sinks is not None
    if not merged and block_sparse_cpu.is_suitable(q, k, v, options, layouts[0]):
        masks = row_mask.dense_masks(k.shape[1], q.shape[1] // k.shape[1], q.dtype)
        return block_sparse_cpu.attend(q, k, v, dense_blocks(layouts[0], length), masks, options.scale)
    dense, block = layouts[0].dense_queries, layouts[0].block
    if 0 < dense < length and dense % block == 0 and not merged:  # whole blocks, which the sparse part can skip
        q_dense, q_sparse = q.split([dense, length - dense], 2)
        out = attend_fused(q_sparse, k, v, row_mask, options, layouts[0], dense // block)
    else:
        if merged:
            out = attend_merged(q, k, v, row_mask, options, layouts)
        else:
            out = attend_fused(q, k, v, row_mask, options, layouts[0])
        if not dense:
            return out
        q_dense, out = q[:, :, :dense], out[:, :, dense:]
    positions = row_mask.layout.positions[: len(q)]
    layout = TokenLayout(positions[:, :dense]).with_keys(positions)
    backend = sdpa if sdpa.unsupported_reason(describe(q, k, v, layout, options)) is None else reference
    return torch.cat([backend.attend(q_dense, k, v, layout, options), out], 2)


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, row_mask: "RowMask", options: ScoreOptions, blocks: BlockLayout, skipped: int = 0
) -> Tensor:
    """One block layout through PyTorch's kernel; the heads of a group are further queries of their key head.

    skipped: the number of blocks of queries before the first query of q.
    """
    groups, outs = q.shape[1] // k.shape[1], []
    portion_size = max(1, PORTION // (k[:, :, 0].numel() * blocks.keys_per_block))
    strided = zip(*(split_groups(x.flatten(0, 1), blocks.stride) for x in (q, k, v)), strict=True)
    for n, (q_n, k_n, v_n) in enumerate(strided):
        queries = split_blocks(q_n, blocks).unflatten(1, (-1, groups)).flatten(2, 3)  # (N, B·K, G·c, E)
        k_row, v_row, portions = pad_keys(k_n, blocks), pad_keys(v_n, blocks), []
        count = blocks.count(k_n.shape[1])
        for first, portion in zip(range(skipped, count, portion_size), queries.split(portion_size), strict=True):
            last = first + len(portion)
            keys, k_row = GatherKeyBlocks.apply(k_row, blocks, first, last, count)
            values, v_row = GatherKeyBlocks.apply(v_row, blocks, first, last, count)
            mask = row_mask.additive(blocks, n, first, last, options.bias, groups, q.dtype)
            out = F.scaled_dot_product_attention(portion, keys, values, mask, options.dropout, scale=options.scale)
            portions.append(out.transpose(1, 2))  # (N, G·c, B·K, Ev), the kernel's memory order
        out = torch.cat(portions).unflatten(1, (groups, -1)).permute(0, 3, 1, 2, 4)  # (N, B·K, G, c, Ev)
        outs.append(merge_blocks(out.flatten(1, 2), q_n.shape[1]))  # (B·H, n, Ev)
    return merge_groups(outs, q.shape[2]).unflatten(0, q.shape[:2])


def attend_merged(
    q: Tensor, k: Tensor, v: Tensor, row_mask: "RowMask", options: ScoreOptions, layouts: tuple[BlockLayout, ...]
) -> Tensor:
    """One softmax over the concatenated scores of all layouts, (B, H, L, keys of all layouts)."""
    shape, dtype, wide = q.shape, q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (reference.per_head(x, q).to(wide).flatten(0, 1) for x in (q, k, v))  # (B·H, n, E)
    with without_autocast(q.device):
        s, allowed = zip(*(row_mask.scores(q, k, options, layouts, n) for n in range(len(layouts))), strict=True)
        weights = reference.normalize(
            torch.cat(s, -1).unflatten(0, shape[:2]), torch.cat(allowed, -1).unsqueeze(0), options.sinks
        )
        weights = F.dropout(weights, options.dropout).flatten(0, 1)
        weights = weights.split([blocks.keys_per_block for blocks in layouts], -1)
        out = torch.stack([weighted_values(w, v, blocks) for w, blocks in zip(weights, layouts, strict=True)]).sum(0)
    return out.unflatten(0, shape[:2]).to(dtype)  # (B, H, L, Ev)


def weighted_values(weights: Tensor, v: Tensor, blocks: BlockLayout) -> Tensor:
    """Weights (A, n, keys) and values (A, n, Ev) -> (A, n, Ev)"""
    outs = [
        merge_blocks(split_blocks(w_n, blocks) @ all_key_blocks(v_n, blocks), v_n.shape[1])
        for w_n, v_n in zip(split_groups(weights, blocks.stride), split_groups(v, blocks.stride), strict=True)
    ]
    return merge_groups(outs, v.shape[1])


def all_key_blocks(x: Tensor, blocks: BlockLayout) -> Tensor:
    """(A, n, E) -> (N, A, keys, E)"""
    count = blocks.count(x.shape[1])
    return GatherKeyBlocks.apply(pad_keys(x, blocks), blocks, 0, count, count)[0]


@dataclass(frozen=True, eq=False)
class RowMask:
    """The allowed pairs of one row of the batch, or of all rows if they have the same mask."""

    layout: TokenLayout
    row: int
    mask: Mask

    @property
    def repeats(self) -> bool:
        """Whether all blocks inside a sequence have the same mask."""
        return self.layout.ordered and self.mask.relative

    def additive(
        self, blocks: BlockLayout, n: int, first: int, last: int, bias: Bias | None, groups: int, dtype: torch.dtype
    ) -> Tensor:
        """(N or 1, 1 or K, G·c, keys) of blocks first … last - 1: 0 or the bias for an allowed pair, else -∞."""
        q, k = self.layout.derived(block_slots, blocks, n)
        start, end = first * blocks.block - blocks.before, last * blocks.block + blocks.after
        if self.repeats and start >= 0 and end <= self.layout.positions.shape[1] // blocks.stride:
            last = first + 1
        computed = slice(first, last) if self.repeats else slice(0, len(q))  # all blocks: cached for all portions
        mask = self.layout.derived(
            block_mask, self.row, self.mask, blocks, n, computed.start, computed.stop, groups, dtype
        )
        mask = mask[first - computed.start : last - computed.start]
        if bias is None:
            return mask
        tile = self.bias_tile(bias, q[first:last], k[first:last], dtype)  # (N, H, c, keys)
        return mask + tile.unflatten(1, (-1, groups)).flatten(2, 3)

    def bias_tile(self, bias: Bias, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Slots (N, c, 1) and (N, 1, keys) -> (N, H, c, keys)"""
        positions = self.layout.positions[self.row]
        return bias.tile(positions[q.squeeze(2)], positions[k.squeeze(1)], dtype)

    def dense_masks(self, heads: int, groups: int, dtype: torch.dtype) -> block_sparse_cpu.BlockMasks:
        """The mask of each dense block, for `heads` key heads that serve `groups` query heads each."""

        def compute(block: DenseBlock) -> tuple[Tensor | None, Tensor | None]:
            block = relative_to_query(block) if self.repeats else block
            return self.layout.derived(dense_mask, self.row, self.mask, block, heads, groups, dtype)

        return compute

    def scores(
        self, q: Tensor, k: Tensor, options: ScoreOptions, layouts: tuple[BlockLayout, ...], index: int
    ) -> tuple[Tensor, Tensor]:
        """The scores (A, n, keys) of one layout, and which pairs are allowed (1, n, keys) and in no earlier layout."""
        blocks, scores, allowed = layouts[index], [], []
        strided = zip(split_groups(q, blocks.stride), split_groups(k, blocks.stride), strict=True)
        for n, (q_n, k_n) in enumerate(strided):
            q_slots, k_slots = self.layout.derived(block_slots, blocks, n)
            s = split_blocks(q_n, blocks) @ all_key_blocks(k_n, blocks).transpose(-1, -2) * options.scale
            if options.softcap is not None:
                s = options.softcap * torch.tanh(s / options.softcap)
            if options.bias is not None:
                s = s + self.bias_tile(options.bias, q_slots, k_slots, q.dtype)  # (N, A, c, keys)
            pairs = allowed_pairs(self.layout, self.row, self.mask, q_slots, k_slots)
            for earlier in layouts[:index]:
                pairs = pairs & ~earlier.in_band(q_slots, k_slots)
            scores.append(merge_blocks(s, q_n.shape[1]))
            allowed.append(merge_blocks(pairs.unsqueeze(1), q_n.shape[1]))
        return merge_groups(scores, q.shape[1]), merge_groups(allowed, q.shape[1])


def block_slots(layout: TokenLayout, blocks: BlockLayout, n: int) -> tuple[Tensor, Tensor]:
    """Slots of the n-th strided group: of each block's queries (N, c, 1) and keys (N, 1, keys); -1: no token."""
    slots = torch.arange(layout.positions.shape[1], dtype=torch.int32, device=layout.positions.device)
    slots = split_groups(slots.view(1, -1, 1), blocks.stride, -1)[n]
    count, band = blocks.count(slots.shape[1]), blocks.band
    k = gather_key_blocks(pad_keys(slots, blocks, -1), blocks, 0, count, count)[:, 0].transpose(1, 2)
    start = torch.arange(count, device=k.device).view(-1, 1, 1) * blocks.block - blocks.before
    duplicate = (k[:, :, band:] >= start) & (k[:, :, band:] < start + band)  # global keys inside the band
    k = torch.cat([k[:, :, :band], k[:, :, band:].masked_fill(duplicate, -1)], 2)
    return split_blocks(slots, blocks, -1)[:, 0], k


def allowed_pairs(layout: TokenLayout, row: int, mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """Slots (N, c, 1) and (N, 1, keys) -> (N, c, keys), True where the query attends to the key."""
    positions = layout.positions[row].int()
    allowed = mask.allows(positions[q], positions[k])
    pairs = k >= 0 if allowed is None else allowed & (k >= 0)
    if layout.segments is not None:
        pairs = pairs & (layout.segments[row][q] == layout.segments[row][k])
    return pairs if layout.valid is None else pairs & layout.valid[row][k]


def block_mask(
    layout: TokenLayout, row: int, mask: Mask, blocks: BlockLayout, n: int, start: int, stop: int, groups: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """(N, 1, G·c, keys) for the blocks from start to stop: 0 where the query attends to the key, else -∞."""
    q, k = layout.derived(block_slots, blocks, n)
    allowed = allowed_pairs(layout, row, mask, q[start:stop], k[start:stop]).repeat(1, groups, 1)
    return torch.where(allowed, 0.0, float("-inf")).to(dtype).unsqueeze(1)


def dense_mask(
    layout: TokenLayout, row: int, mask: Mask, block: DenseBlock, heads: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask (K, G·c, keys) of a block, and its queries without any key; None: nothing to mask.

    In an ordered layout positions are slots, so the slots of a block may be counted from its first query.
    """
    q, k = concatenate_slots(block.queries).unsqueeze(1), concatenate_slots(*block.keys)
    if layout.ordered:
        allowed = mask.allows(q, k)
        if allowed is None:
            return None, None
    else:
        allowed = allowed_pairs(layout, row, mask, q, k)
    allowed = allowed.repeat(groups, 1)
    if allowed.all():
        return None, None
    without_key = ~allowed.any(-1, keepdim=True)
    additive = torch.where(allowed, 0.0, float("-inf")).to(dtype).expand(heads, -1, -1)
    return additive, without_key if without_key.any() else None


def concatenate_slots(*runs: range) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, run.step) for run in runs])


def relative_to_query(block: DenseBlock) -> DenseBlock:
    """The block with slots counted from its first query: equal for most blocks of a relative mask."""
    first = block.queries.start
    queries, *keys = (range(run.start - first, run.stop - first, run.step) for run in (block.queries, *block.keys))
    return DenseBlock(queries, tuple(keys))
