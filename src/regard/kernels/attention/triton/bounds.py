"""Which tiles of keys a tile of queries can see, where tokens stand anywhere: packed, padded, before remembered keys.

Of every tile the lowest and highest place and document are known; two tiles whose ranges do not meet hold no pair that
is seen, and need not be computed. So packed documents skip each other's keys, whatever their lengths. Where documents
stand side by side, a token's place is its slot: positions begin anew inside a tile and would range over all of it.
"""

import torch
from torch import Tensor

NOWHERE = -(2**31)  # the document of a key that nobody sees
FAR = 2**31 - 1


def bounds(
    q_at: Tensor,
    k_at: Tensor,
    q_document: Tensor,
    k_document: Tensor,
    reach: tuple[int, int, int],
    grain: int,
    consecutive: bool = False,
) -> tuple[Tensor, Tensor]:
    """For each tile of queries four slots of keys, and for each tile of keys four of queries: (B, tiles, 4).

    From the first to the last lie all tiles with a pair that is seen; between the others tiles of which every pair is.
    """
    before, after, first = reach
    everywhere = torch.ones_like(q_document, dtype=torch.bool)
    valid = k_document != NOWHERE
    early = Ranges(k_at, k_document, valid, grain, axis=1).low < first
    if consecutive:
        q_at = k_at = torch.arange(q_at.shape[1], dtype=q_at.dtype, device=q_at.device).expand_as(q_at)
    q = Ranges(q_at, q_document, everywhere, grain, axis=2)
    k = Ranges(k_at, k_document, valid, grain, axis=1)
    some = (q.low_document <= k.high_document) & (k.low_document <= q.high_document)  # (B, Tq, Tk)
    all_ = (q.low_document == q.high_document) & (k.low_document == k.high_document) & some & q.whole & k.whole
    if after >= 0:
        some = some & (k.low - q.high <= after)
        all_ = all_ & (k.high - q.low <= after)
    if before >= 0:
        some = some & ((q.low - k.high <= before) | early)
        all_ = all_ & (q.high - k.low <= before)
    return slots(some, all_, grain, k_at.shape[1]), slots(some.mT, all_.mT, grain, q_at.shape[1])


class Ranges:
    """The lowest and highest position and document of each tile, among the tokens that count; is all of it counted?"""

    def __init__(self, layout: Tensor, document: Tensor, counts: Tensor, grain: int, axis: int):
        def tiles(x: Tensor, fill: int) -> Tensor:
            padded = torch.nn.functional.pad(x.where(counts, fill), (0, -x.shape[1] % grain), value=fill)
            return padded.long().unflatten(1, (-1, grain))

        self.low, self.high = (f.unsqueeze(axis) for f in (tiles(layout, FAR).amin(-1), tiles(layout, -FAR).amax(-1)))
        self.low_document, self.high_document = (
            f.unsqueeze(axis) for f in (tiles(document, FAR).amin(-1), tiles(document, -FAR).amax(-1))
        )
        self.whole = tiles(counts.int(), 0).amin(-1).bool().unsqueeze(axis)


def slots(some: Tensor, all_: Tensor, grain: int, length: int) -> Tensor:
    """In each row of (B, rows, tiles): where tiles that are seen begin, where wholly seen ones do, end, and all end."""
    tiles = some.shape[-1]
    index = torch.arange(tiles, device=some.device)
    lo = index.where(some, tiles).amin(-1)
    hi = index.where(some, -1).amax(-1) + 1
    run = index.where(all_, tiles).amin(-1).minimum(hi)
    end = index.where(~all_ & (index >= run.unsqueeze(-1)), tiles).amin(-1).minimum(hi)
    return (torch.stack([lo.minimum(hi), run, end.maximum(run), hi], -1) * grain).clamp_max(length).int()
