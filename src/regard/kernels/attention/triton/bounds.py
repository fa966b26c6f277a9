"""Which tiles of keys a tile of queries attends to, for tokens at any positions: packed, padded or with cached keys.

The minimum and maximum of positions and documents are computed per tile. Two tiles whose ranges are too far apart have
no allowed pair and are skipped, and so are tiles of different documents. If the tokens of every document are
consecutive, slots are used instead of positions, because their ranges are narrower: in a tile with the start of a
document, positions range from 0 to the last position of the previous document.
"""

import torch
from torch import Tensor

NO_DOCUMENT = -(2**31)  # document of an invalid key
INT_MAX = 2**31 - 1


def bounds(
    q_positions: Tensor,
    k_positions: Tensor,
    q_document: Tensor,
    k_document: Tensor,
    limits: tuple[int, int, int],
    tile: int,
    consecutive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Four key slots per tile of queries, and four query slots per tile of keys: (B, tiles, 4) int32 each.

    All tiles with an allowed pair are between the first and the last slot; between the second and the third all pairs
    are allowed.
    """
    before, after, first = limits
    all_valid = torch.ones_like(q_document, dtype=torch.bool)
    valid = k_document != NO_DOCUMENT
    has_first = TileRanges(k_positions, k_document, valid, tile, axis=1).low < first
    if consecutive:
        slots = torch.arange(q_positions.shape[1], dtype=q_positions.dtype, device=q_positions.device)
        q_positions = k_positions = slots.expand_as(q_positions)
    q = TileRanges(q_positions, q_document, all_valid, tile, axis=2)
    k = TileRanges(k_positions, k_document, valid, tile, axis=1)
    any_allowed = (q.low_document <= k.high_document) & (k.low_document <= q.high_document)  # (B, Tq, Tk)
    one_document = (q.low_document == q.high_document) & (k.low_document == k.high_document)
    all_allowed = any_allowed & one_document & q.whole & k.whole
    if after >= 0:
        any_allowed = any_allowed & (k.low - q.high <= after)
        all_allowed = all_allowed & (k.high - q.low <= after)
    if before >= 0:
        any_allowed = any_allowed & ((q.low - k.high <= before) | has_first)
        all_allowed = all_allowed & (q.high - k.low <= before)
    return bound_slots(any_allowed, all_allowed, tile, k_positions.shape[1]), bound_slots(
        any_allowed.mT, all_allowed.mT, tile, q_positions.shape[1]
    )


class TileRanges:
    """The range of positions and documents of the valid tokens of each tile, and whether all its tokens are valid."""

    def __init__(self, positions: Tensor, document: Tensor, valid: Tensor, tile: int, axis: int):
        def tiles(x: Tensor, fill: int) -> Tensor:
            padded = torch.nn.functional.pad(x.where(valid, fill), (0, -x.shape[1] % tile), value=fill)
            return padded.long().unflatten(1, (-1, tile))

        self.low, self.high = (
            x.unsqueeze(axis) for x in (tiles(positions, INT_MAX).amin(-1), tiles(positions, -INT_MAX).amax(-1))
        )
        self.low_document, self.high_document = (
            x.unsqueeze(axis) for x in (tiles(document, INT_MAX).amin(-1), tiles(document, -INT_MAX).amax(-1))
        )
        self.whole = tiles(valid.int(), 0).amin(-1).bool().unsqueeze(axis)


def bound_slots(any_allowed: Tensor, all_allowed: Tensor, tile: int, length: int) -> Tensor:
    """(B, rows, 4) from (B, rows, tiles): the bounds of the allowed tiles, as slots."""
    tiles = any_allowed.shape[-1]
    index = torch.arange(tiles, device=any_allowed.device)
    low = index.where(any_allowed, tiles).amin(-1)
    high = index.where(any_allowed, -1).amax(-1) + 1
    start = index.where(all_allowed, tiles).amin(-1).minimum(high)
    end = index.where(~all_allowed & (index >= start.unsqueeze(-1)), tiles).amin(-1).minimum(high)
    return (torch.stack([low.minimum(high), start, end.maximum(start), high], -1) * tile).clamp_max(length).int()
