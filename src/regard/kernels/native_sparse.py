"""The operations of native sparse attention: compressed blocks, the choice of blocks per query, and attention to them.

    compressed block i = tokens i·stride … i·stride + length - 1 of a document     attended to from its last token on
    importance of block j = Σ_i p_i · |i ∩ j| / stride        p: compressed attention, summed over the heads of a group

A query attends to the `select` most important blocks. The first block of its document, its own and the previous one are
always chosen; ties go to the earlier block. Yuan et al. 2025. Blocks are counted from the first token of the document,
so they are the same in a packed row, a padded batch and a store.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.kernels.attention.reference import normalize
from regard.kernels.autocast import without_autocast
from regard.layout import Bias, TokenLayout

CHUNK = 64  # queries per chunk, which limits the memory: every query gathers a copy of its keys


@dataclass(frozen=True, eq=False)
class SortedKeys:
    """The keys sorted by document and position, invalid ones last."""

    slots: Tensor  # (B, S) slot of the key of rank r
    indices: Tensor  # (B, S) index of this key in its document
    starts: Tensor  # (B, L) rank of the first key of the query's document
    query_indices: Tensor  # (B, L) index of the query in its document


def sort_keys(layout: TokenLayout) -> SortedKeys:
    segments, valid = layout.key_segments, layout.key_valid
    ranks = torch.arange(layout.key_positions.shape[1], device=layout.positions.device).expand_as(layout.key_positions)
    slots = ranks
    invalid = None if valid is None else (~valid).byte()
    for order in (layout.key_positions, segments, invalid):  # stable sorts, the most significant order last
        if order is not None:
            slots = slots.gather(1, order.gather(1, slots).argsort(dim=1, stable=True))
    is_first = torch.zeros_like(ranks, dtype=torch.bool)  # of its document
    for x in (segments, valid):
        if x is not None:
            x = x.gather(1, slots)
            is_first[:, 1:] |= x[:, 1:] != x[:, :-1]
    starts = ranks.where(is_first, 0).cummax(1).values  # (B, S)
    if layout.keys is None:  # the queries are the keys
        inverse = slots.argsort(1)
        return SortedKeys(slots, ranks - starts, starts.gather(1, inverse), (ranks - starts).gather(1, inverse))
    first_position = layout.keys.positions.gather(1, slots[:, :1])  # a state holds one document
    return SortedKeys(slots, ranks - starts, torch.zeros_like(layout.positions), layout.positions - first_position)


def completed_blocks(indices: Tensor, valid: Tensor | None, length: int, stride: int) -> tuple[Tensor, Tensor]:
    """The tokens (B, N) that complete a compressed block, as indices into dim 1, and a mask (B, N): False is padding.

    indices: the index of each token (B, n) in its document.
    """
    complete = (indices + 1 >= length) & ((indices + 1 - length) % stride == 0)
    complete = complete if valid is None else complete & valid
    ends = (~complete).byte().argsort(dim=1, stable=True)[:, : -(-indices.shape[1] // stride)]
    return ends, complete.gather(1, ends)


def gather_keys(x: Tensor, slots: Tensor) -> Tensor:
    """Keys (B, K, S, E) at slots (B, K or 1, n) -> (B, K, n, E)"""
    rows = torch.arange(len(x), device=x.device)[:, None, None]
    heads = torch.arange(x.shape[1], device=x.device)[:, None]
    if not torch.is_grad_enabled():
        return x[rows, heads, slots]  # reads only these keys of a long store
    slots = (rows * x.shape[1] + heads) * x.shape[2] + slots  # flat indices: their gradient is much faster
    return x.reshape(-1, x.shape[3]).index_select(0, slots.flatten()).view(*slots.shape, -1)


def importance(weights: Tensor, compressed_starts: Tensor, length: int, stride: int, block: int, blocks: int) -> Tensor:
    """(B, K, L, blocks), from the weights (B, K, L, N) of compressed blocks whose first tokens have indices (B, N)."""
    i = compressed_starts.unsqueeze(-1)  # (B, N, 1)
    j = torch.arange(blocks, device=i.device) * block
    overlap = torch.minimum(i + length, j + block) - torch.maximum(i, j)  # (B, N, blocks) tokens
    return weights @ (overlap.clamp_min(0) / stride).to(weights.dtype).unsqueeze(1)


def choose_blocks(scores: Tensor, query_indices: Tensor, block: int, select: int) -> Tensor:
    """Scores (B, K, L, J) of blocks and query indices (B, L) -> the chosen blocks (B, K, L, select)."""
    blocks = torch.arange(scores.shape[-1], device=query_indices.device)
    last = (query_indices // block)[:, None, :, None]  # (B, 1, L, 1)
    always = (blocks == 0) | (blocks == last) | (blocks == last - 1)
    scores = scores.masked_fill(always, float("inf")).masked_fill(blocks > last, float("-inf"))
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :select]


def attend_to_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    keys: SortedKeys,
    chosen: Tensor,
    block: int,
    scale: float,
    bias: Bias | None,
    pattern: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Attention of q (B, H, L, E) to the tokens of its chosen blocks (B, K, L, n) of k and v (B, K, S, E).

    The backward recomputes each chunk, so that training stores no gathered keys. `pattern` reads, and may replace, the
    weights of all keys (B, H, L, S), those of other blocks being 0.
    """

    def attend_chunk(q: Tensor, k: Tensor, v: Tensor, queries: slice) -> Tensor:
        indices = (chosen[:, :, queries].unsqueeze(-1) * block + torch.arange(block, device=q.device)).flatten(3)
        allowed = indices <= keys.query_indices[:, None, queries, None]  # (B, K, C, T)
        ranks = (indices + keys.starts[:, None, queries, None]).clamp_max(k.shape[2] - 1)
        slots = keys.slots.unsqueeze(1).expand(-1, k.shape[1], -1).gather(2, ranks.flatten(2))  # (B, K, C·T)
        k, v = (gather_keys(x, slots).unflatten(2, ranks.shape[2:]) for x in (k, v))  # (B, K, C, T, E)
        wide = torch.promote_types(q.dtype, torch.float32)
        q_groups = q.unflatten(1, (k.shape[1], -1)).transpose(2, 3)  # (B, K, C, G, E)
        with without_autocast(q.device):
            s = q_groups.to(wide) @ k.to(wide).transpose(-1, -2) * scale  # (B, K, C, G, T)
            if bias is not None:
                positions = layout.key_positions.unsqueeze(1).expand(-1, k.shape[1], -1).gather(2, slots).view_as(ranks)
                s = s + chosen_bias(bias, layout.positions[:, queries], positions, s)
            weights = normalize(s, allowed.unsqueeze(3))
            if pattern is not None:
                weights = replace_weights(weights, allowed, slots.view_as(ranks), keys.slots.shape[1], pattern)
            out = weights @ v.to(wide)
        return out.to(q.dtype).transpose(2, 3).flatten(1, 2)  # (B, H, C, E)

    run = partial(checkpoint, attend_chunk, use_reentrant=False) if torch.is_grad_enabled() else attend_chunk
    size = CHUNK if pattern is None else q.shape[2]
    chunks = [slice(start, start + size) for start in range(0, q.shape[2], size)]
    return torch.cat([run(q[:, :, queries], k, v, queries) for queries in chunks], 2)  # (B, H, L, E)


def replace_weights(
    weights: Tensor, allowed: Tensor, slots: Tensor, keys: int, pattern: Callable[[Tensor], Tensor]
) -> Tensor:
    """Weights (B, K, L, G, T) of the keys at slots (B, K, L, T), which `pattern` reads as (B, H, L, S)."""
    index = slots.unsqueeze(3).expand_as(weights)
    dense = weights.new_zeros(*weights.shape[:4], keys).scatter_add(-1, index, weights)  # masked keys have weight 0
    new = pattern(dense.transpose(2, 3).flatten(1, 2)).unflatten(1, (weights.shape[1], -1)).transpose(2, 3)
    return new.gather(-1, index).where(allowed.unsqueeze(3), 0.0)  # a masked key can be at the slot of another one


def chosen_bias(bias: Bias, q_positions: Tensor, k_positions: Tensor, s: Tensor) -> Tensor:
    """The bias of scores s (B, K, C, G, T), from the positions of queries (B, C) and of their keys (B, K, C, T)."""
    groups = s.shape[3]
    heads = [
        bias.tile(q_positions.unsqueeze(-1), keys, s.dtype)[:, :, n * groups : (n + 1) * groups, 0]
        for n, keys in enumerate(k_positions.unbind(1))
    ]
    return torch.stack(heads, 1)
