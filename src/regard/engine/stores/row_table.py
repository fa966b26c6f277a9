"""The rows of a store: how many tokens each has read, and what is kept of them alike in every store.

States say of every forward that it took place (`note`), so lengths are known where they are asked for: when a row goes
back, or another goes on from where it is.
"""

from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from regard.engine.stores.snapshot import CannotRewind, Snapshot
from regard.layout import TokenLayout


class Holder(Protocol):
    def held(self, row: int) -> list[Tensor]:
        """All that it has of a row: views of it."""
        ...


class Carrier(Holder, Protocol):
    """What cannot always go back by itself."""

    def lost(self, row: int, length: int) -> str | None:
        """Why it cannot go back to this length; None: it can."""
        ...

    def clear(self, row: int, start: int) -> None:
        """Forget a row's tokens from this position on."""
        ...


class RowTable:
    def __init__(self, count: int, device: torch.device | str):
        self.device = device
        self.read = torch.zeros(count, dtype=torch.int64, device=device)
        self.carriers: list[Carrier] = []
        self.sources: list[Holder] = []
        self.taken: WeakSet[Snapshot] = WeakSet()

    def __len__(self) -> int:
        return len(self.read)

    def note(self, layout: TokenLayout) -> None:
        """Every state says that it was there; the first of a forward is heard."""
        layout.once((self, "read"), lambda: self.count(layout))

    def count(self, layout: TokenLayout) -> None:
        rows = rows_of(layout)
        ends = layout.positions + 1 if layout.valid is None else (layout.positions + 1) * layout.valid  # (B, L)
        last = ends.amax(1)  # (B,) zero where no token is valid
        self.read[rows] = last.where(last > 0, self.read[rows])

    def snapshot(self, row: int) -> Snapshot:
        held = [[array.clone() for array in carrier.held(row)] for carrier in self.carriers]
        snapshot = Snapshot(row, int(self.read[row]), held)
        self.taken.add(snapshot)
        return snapshot

    def rewind(self, row: int, length: int, snapshot: Snapshot | None) -> None:
        read = int(self.read[row])
        if not 0 <= length <= read:
            raise ValueError(f"row {row} has read {read} tokens; it can be rewound to one of 0 to {read}, not {length}")
        if snapshot is not None:
            self.check(row, length, snapshot)
            self.put(row, snapshot)
        elif 0 < length < read:  # a text that begins anew needs nothing
            for why in filter(None, (carrier.lost(row, length) for carrier in self.carriers)):
                raise CannotRewind(
                    f"row {row} cannot go back from {read} to {length} tokens: {why}; "
                    "rewind with a snapshot that was taken there, or read the text again"
                )
        self.forget(row, length)

    def fork(self, row: int, to: int, snapshot: Snapshot) -> None:
        self.check(row, snapshot.length, snapshot)
        if int(self.read[to]) > 0:
            raise ValueError(f"row {to} has read {int(self.read[to])} tokens of its own; release it first")
        self.put(to, snapshot)
        for source in self.sources:
            copy(source.held(row), source.held(to))
        self.read[to] = snapshot.length

    def release(self, row: int) -> None:
        self.forget(row, 0)
        for source in self.sources:
            for array in source.held(row):
                array.zero_()

    def forget(self, row: int, length: int) -> None:
        for carrier in self.carriers:
            carrier.clear(row, length)
        self.read[row] = length
        for snapshot in self.taken:
            snapshot.stale |= snapshot.row == row and snapshot.length > length

    def check(self, row: int, length: int, snapshot: Snapshot) -> None:
        if (snapshot.row, snapshot.length) != (row, length):
            raise CannotRewind(
                f"the snapshot is of row {snapshot.row} with {snapshot.length} tokens, not of row {row} with {length}"
            )
        if snapshot.stale:
            raise CannotRewind(f"row {row} has gone back behind this snapshot of {length} tokens; take another")

    def put(self, row: int, snapshot: Snapshot) -> None:
        for carrier, held in zip(self.carriers, snapshot.held, strict=True):
            copy(held, carrier.held(row))


def copy(some: list[Tensor], to: list[Tensor]) -> None:
    for old, new in zip(some, to, strict=True):
        new.copy_(old)


def rows_of(layout: TokenLayout) -> slice | Tensor:
    """The rows of the store that this forward is about."""
    return slice(len(layout.positions)) if layout.rows is None else layout.rows
