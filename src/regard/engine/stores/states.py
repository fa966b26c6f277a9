"""Storage for every state that a model declares (parts/state.py).

Recurrent states, and the keys and values of a source for cross-attention, are the same in every store and are here.
Layers with an attention window have ring buffers (ring.py). The store decides how all other per-token arrays are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engine.stores.arrays import QuantizedTokens, zeros
from regard.engine.stores.base import ModelMemory
from regard.engine.stores.evicting import EvictedTokens, EvictingSlots, EvictingStorage
from regard.engine.stores.eviction_rules import EvictionRule
from regard.engine.stores.recent import RecentStorage
from regard.engine.stores.ring import RingBuffer, RingStorage
from regard.engine.stores.rows import RowTable, Storage, Storages, copy, row_indices, rows_of
from regard.engine.stores.streaming import StreamedTokens, StreamingRing, StreamingStorage
from regard.layout import Source, TokenLayout
from regard.parts.state import FixedSize, Memory, PerSource, PerToken, declarations

SOURCE_SPAN = 64  # initial number of source slots that are read; it grows with the longest source


def build_storages(
    memory: ModelMemory,
    rows: RowTable,
    capacity: int,
    slack: int,
    source: int,
    dtype: torch.dtype,
    per_token: Callable[[PerToken], Storage],
) -> Storages:
    """Layers with an attention window get a ring buffer if that is smaller, other attention layers `per_token`."""
    rings: dict[tuple[int, int], RingBuffer] = {}
    streaming: dict[tuple[int, int], StreamingRing] = {}
    evicting: dict[EvictionRule, EvictingSlots] = {}

    def ring(window: int, first: int) -> RingBuffer:
        if (window, first) not in rings:
            rings[window, first] = RingBuffer(window, first, slack, rows)
        return rings[window, first]

    def keep(declared: PerToken) -> Storage:
        match declared.window:
            case int(window) if declared.first + window + slack < capacity:
                return RingStorage(declared, ring(window, declared.first), dtype)
        return per_token(declared)

    def build(declared: PerToken | FixedSize | PerSource) -> Storage:
        match declared:
            case StreamedTokens(window=int(window), first=first):
                if (window, first) not in streaming:
                    streaming[window, first] = StreamingRing(window, first, slack, rows)
                return StreamingStorage(declared, streaming[window, first], dtype)
            case EvictedTokens(rule=rule):
                if rule not in evicting:
                    evicting[rule] = EvictingSlots(rule, rows, capacity)
                return EvictingStorage(declared, evicting[rule], dtype)
            case QuantizedTokens(recent=recent) if recent > 0:
                window = min(recent, capacity)  # a row has no more tokens
                newest = PerToken(declared.arrays, window=window)
                return RecentStorage(keep(declared), RingStorage(newest, ring(window, 0), dtype), recent)
            case PerToken():
                return keep(declared)
            case FixedSize():
                return FixedStorage(declared, rows, dtype)
            case PerSource():
                return SourceStorage(declared, rows, source, dtype)

    def build_all(declared: Memory) -> tuple[Storage, ...]:
        return tuple(build(kind) for kind in declarations(declared) if kind is not None)

    return Storages(tuple(tuple(build_all(declared) for declared in block) for block in memory))


class FixedStorage:
    """Recurrent states: arrays of a fixed size per row."""

    placer = None

    def __init__(self, declared: FixedSize, rows: RowTable, dtype: torch.dtype):
        wide = torch.promote_types(dtype, torch.float32)
        self.arrays = {name: zeros((len(rows), *shape), wide, rows.device) for name, shape in declared.arrays.items()}
        rows.overwriting.append(self)

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> "FixedStorage":
        return self  # `read` and `write` take the rows from their layout

    def read(self, layout: TokenLayout, **initial: Tensor) -> tuple[Tensor, ...]:
        rows, starts = rows_of(layout), layout.derived(starting_rows)
        return tuple(
            new.where(starts.view(-1, *[1] * (new.dim() - 1)), self.arrays[name][rows]) for name, new in initial.items()
        )

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        rows = rows_of(layout)
        for name, array in arrays.items():
            self.arrays[name][rows] = array.to(self.arrays[name].dtype)

    def row_arrays(self, row: int) -> list[Tensor]:
        return [array[row] for array in self.arrays.values()]

    def restore(self, row: int, copies: list[Tensor]) -> None:
        copy(copies, self.row_arrays(row))

    def why_not_rewind(self, row: int, length: int) -> str:
        return "a recurrent state is a sum over its tokens, which cannot be undone"

    def clear(self, row: int, start: int) -> None:
        pass  # a sequence that starts at position 0 reads the initial state instead


def starting_rows(layout: TokenLayout) -> Tensor:
    """(B,) True where a row's sequence starts in this forward"""
    first = layout.positions == 0 if layout.valid is None else (layout.positions == 0) & layout.valid  # (B, L)
    return first.any(-1)


class SourceStorage:
    """Keys and values of each row's source, computed once, with the row's first tokens."""

    placer = None

    def __init__(self, declared: PerSource, rows: RowTable, length: int, dtype: torch.dtype):
        if length < 1:
            raise ValueError(
                f"source={length}, but this model has cross-attention; give the longest source's length, such as 512"
            )
        self.arrays = {
            name: zeros((len(rows), heads, length, dim), dtype, rows.device)
            for name, (heads, dim) in declared.arrays.items()
        }
        self.valid = torch.zeros(len(rows), length, dtype=torch.bool, device=rows.device)  # False past a source's end
        self.positions = torch.arange(length, device=rows.device)
        self.rows = rows
        self.span = min(SOURCE_SPAN, length)  # slots that are read: at least the longest source so far
        rows.sources.append(self)

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> "SourceStorage":
        return self  # `read_source` takes the rows from its layout

    def read_source(self, layout: TokenLayout, compute: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        rows, source = rows_of(layout), layout.inputs.source
        if source is not None:
            self.check_length(layout, source)
            self.store_source(rows, source, compute(source.x))
        valid = self.valid[rows, : self.span]
        keys = TokenLayout(self.positions[: self.span].expand_as(valid), valid=valid)
        return (*(a[rows, :, : self.span] for a in self.arrays.values()), layout.cross(keys))

    def row_arrays(self, row: int) -> list[Tensor]:
        return [self.valid[row], *(array[row] for array in self.arrays.values())]

    def is_empty(self, row: int) -> bool:
        return not self.valid[row].any()

    def require(self, rows: Sequence[int]) -> "RequiredSource":
        return RequiredSource(self, rows)

    def check_length(self, layout: TokenLayout, source: Source) -> None:
        length, capacity = source.x.shape[1], len(self.positions)
        if length > capacity:
            self.empty_starting_rows(layout)
            raise ValueError(
                f"the source has {length} tokens, but the store holds {capacity}; open the store with a larger source"
            )

    def empty_starting_rows(self, layout: TokenLayout) -> None:
        """Set the lengths of the rows that start in this forward to 0, because it fails."""
        self.rows.lengths[row_indices(layout)[layout.derived(starting_rows)]] = 0

    def store_source(self, rows: slice | Tensor, source: Source, arrays: dict[str, Tensor]) -> None:
        length, capacity = source.x.shape[1], len(self.positions)
        if length > self.span:
            self.span = min(1 << (length - 1).bit_length(), capacity)  # powers of two: shapes rarely change
        valid, padding = source.layout.valid, capacity - length
        valid = torch.ones_like(source.layout.positions, dtype=torch.bool) if valid is None else valid
        self.valid[rows] = F.pad(valid, (0, padding))
        for name, new in arrays.items():
            new = new.masked_fill(~valid[:, None, :, None], 0)  # attention multiplies masked values too
            self.arrays[name][rows] = F.pad(new, (0, 0, 0, padding))


class RequiredSource(NamedTuple):
    """The state of a forward in which rows start that have no source yet, so the forward must have one."""

    storage: SourceStorage
    rows: Sequence[int]

    def read_source(self, layout: TokenLayout, compute: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        if layout.inputs.source is None:
            self.storage.empty_starting_rows(layout)
            raise ValueError(
                f"rows {list(self.rows)} start here, but they have no source; pass it with their first tokens"
            )
        return self.storage.read_source(layout, compute)
