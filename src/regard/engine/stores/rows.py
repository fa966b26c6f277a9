"""The rows of a store: their lengths, the operations on a row that all stores share, and the states of one forward.

A storage object keeps the arrays of one layer as long as its store exists; `bind` returns the state that the layer uses
in one forward.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor

from regard.engine.stores.base import CannotRewind, ModelMemory, Snapshot
from regard.layout import TokenLayout
from regard.parts.state import STATELESS, State, exact_cache_limit, needs_snapshots

UNKNOWN = 2**31 - 1  # length of the prompt in a row without a request


class RowArrays(Protocol):
    def row_arrays(self, row: int) -> list[Tensor]:
        """Views of everything kept for a row."""
        ...


class OverwritingState(RowArrays, Protocol):
    """A state that does not keep all tokens, so it cannot always rewind by itself."""

    def why_not_rewind(self, row: int, length: int) -> str | None:
        """Why the row cannot return to this length without a snapshot; None: it can."""
        ...

    def restore(self, row: int, copies: list[Tensor]) -> None:
        """Replace everything kept for a row by copies of its `row_arrays`."""
        ...

    def clear(self, row: int, start: int) -> None:
        """Drop a row's tokens from this position on."""
        ...


@runtime_checkable
class SourceArrays(RowArrays, Protocol):
    def is_empty(self, row: int) -> bool:
        """Whether the row has no source."""
        ...

    def require(self, rows: Sequence[int]) -> State:
        """The state of a forward in which these rows start and have no source yet."""
        ...


class CheckedRows(NamedTuple):
    rewinds: list[tuple[int, int]]  # (row, first position) of the rows whose tokens start before the row's end
    sourceless: list[int]  # rows that start at position 0 and have no source yet


class RowTable:
    """The length of every row, and the states that cannot always rewind by themselves."""

    def __init__(self, count: int, device: torch.device | str, memory: ModelMemory):
        self.device = device
        self.max_exact_cache = exact_cache_limit(memory)
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)
        self.bounds = [0] * count  # on the host: no row has been longer since it was released
        self.prompts = [UNKNOWN] * count  # tokens of each row's prompt
        self.needs_snapshots = needs_snapshots(memory)
        self.overwriting: list[OverwritingState] = []
        self.sources: list[SourceArrays] = []
        self.snapshots: WeakSet[Snapshot] = WeakSet()

    def __len__(self) -> int:
        return len(self.lengths)

    def advance(self, layout: TokenLayout) -> None:
        """Update the lengths of the rows by these tokens."""
        rows = rows_of(layout)
        ends = layout.positions + 1 if layout.valid is None else (layout.positions + 1) * layout.valid  # (B, L)
        last = ends.amax(1)  # (B,) zero where no token is valid
        self.lengths[rows] = last.where(last > 0, self.lengths[rows])

    def check(self, layout: TokenLayout, capacity: int) -> CheckedRows:
        """Raise ValueError where tokens do not continue the sequences of their rows.

        The tokens of a row have consecutive positions, in order, from the row's length on. If they start earlier, the
        store must rewind the row to their first position; CannotRewind if a layer cannot. Position 0 is always allowed.
        """
        if layout.segments is not None:
            raise ValueError(
                "packed documents cannot be cached: a row of a store holds one sequence; use one row per document"
            )
        positions, valid = layout.positions, layout.valid
        rows = list(range(len(positions))) if layout.rows is None else layout.rows.tolist()
        if len(rows) != len(positions) or len(set(rows)) < len(rows) or min(rows) < 0 or max(rows) >= len(self):
            raise ValueError(f"rows={rows} must be {len(positions)} different rows, each from 0 to {len(self) - 1}")
        valid = torch.ones_like(positions, dtype=torch.bool) if valid is None else valid
        indices = valid.cumsum(1)  # (B, L) from 1, among the valid tokens of the row
        offsets = positions - indices  # all equal if the positions are consecutive and in order
        smallest = offsets.where(valid, capacity).amin(1)
        largest = offsets.where(valid, -capacity).amax(1)
        numbers = torch.stack([smallest, largest, indices[:, -1], self.lengths[rows_of(layout)]], 1).tolist()
        rewinds, sourceless = [], []
        for b, (row, (offset, largest_offset, count, length)) in enumerate(zip(rows, numbers, strict=True)):
            if count == 0:
                continue
            start, end = offset + 1, offset + count
            self.bounds[row] = max(self.bounds[row], end + 1)
            if start < 0 or largest_offset != offset:
                raise ValueError(
                    f"row {row}: its positions {positions[b][valid[b]].tolist()} are not consecutive from 0 or more; "
                    "sort its tokens and leave no gaps"
                )
            if start > length:
                raise ValueError(f"row {row} has {length} tokens, so the next position is {length}, not {start}")
            if start < length:
                self.check_rewind(row, start, length)
                rewinds.append((row, start))
            if start == 0 and any(source.is_empty(row) for source in self.sources):
                sourceless.append(row)
            if end >= capacity:
                raise ValueError(
                    f"row {row}: position {end} does not fit into the store's capacity={capacity}; use a larger one"
                )
            if self.max_exact_cache is not None and end >= self.max_exact_cache:
                raise ValueError(
                    f"row {row}: position {end}, but this model is cached exactly up to {self.max_exact_cache} tokens "
                    "only, because its rotations depend on the length of the sequence; compute longer sequences in one "
                    "forward without a store"
                )
        return CheckedRows(rewinds, sourceless)

    def check_row(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise ValueError(f"row {row} does not exist; choose one from 0 to {len(self) - 1}")

    def snapshot(self, row: int) -> Snapshot:
        self.check_row(row)
        snapshot = Snapshot(row, int(self.lengths[row]), self.copy_state(row))
        self.snapshots.add(snapshot)
        return snapshot

    def copy_state(self, row: int) -> list[list[Tensor]]:
        """Copies of the arrays of every state that cannot rewind by itself."""
        return [[array.clone() for array in state.row_arrays(row)] for state in self.overwriting]

    def rewind(self, row: int, length: int, snapshot: Snapshot | None) -> None:
        current = int(self.lengths[row])
        if not 0 <= length <= current:
            raise ValueError(f"row {row} has {current} tokens; it cannot be rewound to {length}, choose 0 to {current}")
        if snapshot is not None:
            self.check_snapshot(row, length, snapshot)
            self.restore(row, snapshot.arrays, length)
        else:
            self.check_rewind(row, length, current)
        self.truncate(row, length)

    def check_rewind(self, row: int, length: int, current: int) -> None:
        """Raise CannotRewind if the row cannot return to this length without a snapshot."""
        if not 0 < length < current:  # an empty row needs no state
            return
        for reason in filter(None, (state.why_not_rewind(row, length) for state in self.overwriting)):
            raise CannotRewind(
                f"row {row} cannot return from {current} to {length} tokens: {reason}; "
                f"rewind with a snapshot of {length} tokens, or release the row and compute the sequence again"
            )

    def fork(self, row: int, to: int, snapshot: Snapshot) -> None:
        self.check_snapshot(row, snapshot.length, snapshot)
        if int(self.lengths[to]) > 0:
            raise ValueError(f"row {to} already has {int(self.lengths[to])} tokens; release it first")
        self.restore(to, snapshot.arrays, snapshot.length)
        self.prompts[to] = self.prompts[row]
        for source in self.sources:
            copy(source.row_arrays(row), source.row_arrays(to))

    def release(self, row: int) -> None:
        self.truncate(row, 0)
        self.prompts[row] = UNKNOWN
        for source in self.sources:
            for array in source.row_arrays(row):
                array.zero_()

    def truncate(self, row: int, length: int) -> None:
        for state in self.overwriting:
            state.clear(row, length)
        self.lengths[row] = length
        for snapshot in self.snapshots:
            snapshot.stale |= snapshot.row == row and snapshot.length > length

    def restore(self, row: int, copies: list[list[Tensor]], length: int) -> None:
        """Continue from copies of the states after this many tokens."""
        for state, arrays in zip(self.overwriting, copies, strict=True):
            state.restore(row, arrays)
        self.lengths[row] = length
        self.bounds[row] = max(self.bounds[row], length)

    def check_snapshot(self, row: int, length: int, snapshot: Snapshot) -> None:
        if snapshot not in self.snapshots:
            raise CannotRewind("the snapshot is of another store; use one that this store's snapshot() returned")
        if (snapshot.row, snapshot.length) != (row, length):
            raise CannotRewind(
                f"the snapshot is of row {snapshot.row} with {snapshot.length} tokens, not of row {row} with {length}; "
                "use a snapshot of that row and length"
            )
        if snapshot.stale:
            raise CannotRewind(
                f"row {row} has been rewound to fewer than the {length} tokens of this snapshot; take a new snapshot"
            )


def check_sizes(rows: int, capacity: int, slack: int) -> None:
    """Raise ValueError if a store cannot have these sizes."""
    for name, size, smallest in (("rows", rows, 1), ("capacity", capacity, 1), ("slack", slack, 0)):
        if not hasattr(size, "__index__") or size < smallest:
            raise ValueError(f"store: {name}={size!r} must be an integer of at least {smallest}")


def copy(arrays: list[Tensor], to: list[Tensor]) -> None:
    for old, new in zip(arrays, to, strict=True):
        new.copy_(old)


class Placer(Protocol):
    """A store or a ring buffer: it assigns slots to new tokens, once per forward for all of its layers."""

    def place(self, layout: TokenLayout, span: int) -> Any:
        """The slots of these tokens, and the keys that they attend to: those of the first `span` slots."""
        ...


class Storage(Protocol):
    arrays: dict[str, Tensor]
    placer: Any  # the Placer of its slots; None: it has one slot per row

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> State:
        """The state of one forward; `placements`: the result of `place` for these tokens, by placer."""
        ...


class Storages:
    """All storage of a store, nested like the states of a forward: per block and sublayer, any number of them."""

    def __init__(self, nested: tuple[tuple[tuple[Storage, ...], ...], ...]):
        self.nested = nested
        self.placers: list[Placer] = list(dict.fromkeys(storage.placer for storage in self if storage.placer))

    def bind(self, layout: TokenLayout, span: int, sourceless: Sequence[int] = ()) -> tuple[tuple[State, ...], ...]:
        """The states of one forward. sourceless: rows that start in it and have no source yet."""
        placements = {placer: placer.place(layout, span) for placer in self.placers}

        def sublayer_state(storages: tuple[Storage, ...]) -> State:
            states = [storage.bind(layout, placements) for storage in storages]
            if sourceless:
                states = [state.require(sourceless) if isinstance(state, SourceArrays) else state for state in states]
            return states[0] if len(states) == 1 else CombinedState(*states) if states else STATELESS

        return tuple(tuple(sublayer_state(storages) for storages in block) for block in self.nested)

    def __iter__(self) -> Iterator[Storage]:
        """Those of a layer that has several for the same tokens are returned one by one."""
        all_storages = (storage for block in self.nested for storages in block for storage in storages)
        return (part for storage in all_storages for part in getattr(storage, "parts", (storage,)))


class CombinedState:
    """The state of a body that declares several kinds: it has the methods of all."""

    def __init__(self, *states: State):
        for state in states:
            for method in ("extend", "pages", "read", "write", "read_source"):
                if hasattr(state, method):
                    setattr(self, method, getattr(state, method))


class KeyLayout:
    """The keys that a forward reads from a store. All layers share one layout and what is derived from it."""

    def __init__(self, positions: Tensor, valid: Tensor | None = None, visible: tuple[Tensor, Tensor] | None = None):
        """visible: as in TokenLayout."""
        self.positions, self.valid, self.visible = positions, valid, visible
        self.queries: TokenLayout | None = None
        self.layout: TokenLayout | None = None

    def attach(self, queries: TokenLayout) -> TokenLayout:
        """The layout of these queries with the store's keys."""
        if self.layout is None or self.queries is not queries:
            valid, visible = self.valid, self.visible
            if visible is not None and queries.positions.shape[1] == 1:  # every backend supports keys that are invalid
                is_visible = (visible[0] <= queries.positions) & (queries.positions < visible[1])
                valid, visible = is_visible if valid is None else valid & is_visible, None
            self.queries, self.layout = queries, queries.with_keys(self.positions, valid, visible=visible)
        return self.layout


def rows_of(layout: TokenLayout) -> slice | Tensor:
    """The rows of the store that hold the sequences of the batch."""
    return slice(len(layout.positions)) if layout.rows is None else layout.rows


def row_indices(layout: TokenLayout) -> Tensor:
    """The same as a tensor (B,)."""
    return torch.arange(len(layout.positions), device=layout.positions.device) if layout.rows is None else layout.rows
