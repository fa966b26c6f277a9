"""Streaming: a model reads a sequence of any length with the keys of its first tokens and of its newest ones.

    query i attends to    j < first,  and  i - window < j ≤ i        at most first + window keys, whatever the mask
    position of a key     counted among these keys: the distance to a first token never exceeds first + window - 1

The other keys are evicted: a ring buffer keeps the rest (ring.py), so memory does not depend on the length. Newest keys
have the distances that they had. Of the first tokens each query has its own copies, at positions that are larger by
shift(i) = max(0, i - (first + window - 1)), so their keys are rotated further. The layout says which query attends to
which key, so a chunk of queries gives the same as single tokens. With first = 0 it is a plain sliding window.
Xiao et al. 2023, StreamingLLM (arXiv:2309.17453).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engine.stores.ring import RingBuffer, RingPlacement, RingState, RingStorage
from regard.engine.stores.rows import KeyLayout, RowTable, rows_of
from regard.layout import TokenLayout
from regard.parts.state import PerToken


@dataclass(frozen=True)
class StreamedTokens(PerToken):
    """Per-token arrays of which a store keeps the first tokens and a window of the newest, though the mask has none."""


class StreamingRing(RingBuffer):
    def __init__(self, window: int, first: int, slack: int, rows: RowTable):
        super().__init__(window, first, slack, rows)
        self.budget = first + window

    def place(self, layout: TokenLayout, span: int) -> RingPlacement:
        """The keys are those of the ring, then a copy of the first tokens for each query."""
        placement = super().place(layout, span)
        kept, queries = placement.keys, layout.positions
        is_first = kept.positions < self.first
        end = (kept.positions + self.window).where(~is_first, self.budget)  # from there on, queries attend to copies
        shift = layout.derived(shifts, self.budget)  # (B, L)
        copies = (shift.unsqueeze(-1) + torch.arange(self.first, device=queries.device)).flatten(1)  # (B, L · first)
        is_read = shift > 0 if layout.valid is None else (shift > 0) & layout.valid  # padding may repeat a position
        query, is_read = (x.repeat_interleave(self.first, 1) for x in (queries, is_read))
        valid = torch.ones_like(is_first) if kept.valid is None else kept.valid
        keys = KeyLayout(
            torch.cat([kept.positions, copies], 1),
            torch.cat([valid, is_read], 1),
            (torch.cat([torch.zeros_like(end), query], 1), torch.cat([end, query + 1], 1)),
        )
        return placement._replace(keys=keys)


def shifts(layout: TokenLayout, budget: int) -> Tensor:
    """(B, L): how much larger the position of each query is than its index among the keys that it attends to."""
    return (layout.positions - (budget - 1)).clamp_min(0)


class StreamingStorage(RingStorage):
    def __init__(self, declared: StreamedTokens, ring: StreamingRing, dtype: torch.dtype):
        super().__init__(declared, ring, dtype)
        self.rotated = dict(declared.rotated or ())

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> Any:
        return StreamingState(self, placements[self.placer])

    def copies(self, name: str, layout: TokenLayout) -> Tensor:
        """The first tokens as each query attends to them, (B, heads, L · first, dim)."""
        ring = self.ring
        first = ring.per_row(self.arrays[name])[rows_of(layout), : ring.first].transpose(1, 2)  # (B, heads, first, dim)
        shift = layout.derived(shifts, ring.first + ring.window)[:, None, :, None].expand(-1, 1, -1, ring.first)
        first = first.unsqueeze(2).expand(-1, -1, shift.shape[2], -1, -1)  # (B, heads, L, first, dim)
        return (self.rotated[name].shift(first, shift) if name in self.rotated else first).flatten(2, 3)


class StreamingState(NamedTuple):
    storage: StreamingStorage
    placement: RingPlacement

    def pages(self, layout: TokenLayout, *names: str) -> None:
        return None  # a kernel would read the slack of the ring too

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        *kept, key_layout = RingState(self.storage, self.placement).extend(layout, **arrays)
        if not self.storage.ring.first:
            return (*kept, key_layout)
        copies = (self.storage.copies(name, layout) for name in arrays)
        return (*(torch.cat(pair, 2) for pair in zip(kept, copies, strict=True)), key_layout)
