"""The contiguous store: every row has its full capacity from the start, position t in slot t."""

import torch
from torch import Tensor

from regard.engine.stores.ring import SLACK
from regard.engine.stores.row_table import RowTable, rows_of
from regard.engine.stores.snapshot import Snapshot
from regard.engine.stores.states import build_states, leaves
from regard.layout import TokenLayout
from regard.parts.state import PerToken


class Contiguous:
    def __init__(
        self, memory, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        source: int = 0, slack: int = SLACK,
    ):  # fmt: skip
        self.rows, self.capacity, self.span = rows, capacity, capacity
        self.past = RowTable(rows, device)
        self.states = build_states(
            memory, self.past, capacity, slack, source, dtype, lambda declared: ContiguousState(declared, self, dtype)
        )
        self.in_slots = [state for state in leaves(self.states) if isinstance(state, ContiguousState)]

    def reserve(self, row: int, length: int) -> bool:
        """Make room for this many tokens of a row; False when there is none."""
        return length <= self.capacity

    def snapshot(self, row: int) -> Snapshot:
        """What rewind and fork need where a layer does not keep all its tokens."""
        return self.past.snapshot(row)

    def rewind(self, row: int, length: int, snapshot: Snapshot | None = None) -> None:
        """Forget a row's tokens from this position on; CannotRewind where a layer cannot without a snapshot."""
        stop = int(self.past.read[row])
        self.past.rewind(row, length, snapshot)
        self.clear(row, length, stop)

    def fork(self, row: int, to: int, snapshot: Snapshot) -> bool:
        """Let another row, which has read nothing, go on from a snapshot of this one; False when there is no room."""
        self.past.fork(row, to, snapshot)
        for state in self.in_slots:
            state.copy(row, to, snapshot.length)
        return True

    def release(self, row: int) -> None:
        """Give a row's room back, and its source."""
        self.clear(row, 0, int(self.past.read[row]))
        self.past.release(row)

    def clear(self, row: int, start: int, stop: int) -> None:
        for state in self.in_slots:
            state.clear(row, start, stop)


class ContiguousState:
    def __init__(self, declared: PerToken, store: Contiguous, dtype: torch.dtype):
        self.store = store
        self.arrays = {  # one slot more than the capacity: invalid tokens are written there
            name: torch.zeros(store.rows, heads, store.capacity + 1, dim, dtype=dtype, device=store.past.device)
            for name, (heads, dim) in declared.arrays.items()
        }

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        self.store.past.note(layout)
        rows, slots = layout.once((self.store, "place"), lambda: self.place(layout))
        span = self.store.span
        kept = []
        for name, new in arrays.items():
            array = self.arrays[name]  # (rows, heads, capacity + 1, dim)
            array[rows, :, slots] = new.transpose(1, 2)
            kept.append(array[rows_of(layout), :, :span])
        keys = layout.once(
            (self.store, "keys"),
            lambda: layout.with_keys(torch.arange(span, device=rows.device).expand(len(rows), span)),
        )
        return (*kept, keys)

    def copy(self, row: int, to: int, stop: int) -> None:
        for array in self.arrays.values():
            array[to, :, :stop] = array[row, :, :stop]

    def clear(self, row: int, start: int, stop: int) -> None:
        for array in self.arrays.values():
            array[row, :, start:stop] = 0

    def place(self, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        batch = len(layout.positions)
        rows = torch.arange(batch, device=layout.positions.device) if layout.rows is None else layout.rows
        slots = layout.positions if layout.valid is None else layout.positions.where(layout.valid, self.store.capacity)
        return rows.unsqueeze(-1), slots  # (B, 1), (B, L)
