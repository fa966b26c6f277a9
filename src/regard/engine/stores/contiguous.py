"""The contiguous store: every row has its full capacity from the start, position t in slot t."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.engine.stores.base import SLACK, ModelMemory, Snapshot
from regard.engine.stores.rows import KeyLayout, RowTable, check_sizes, row_indices, rows_of
from regard.engine.stores.states import build_storages
from regard.layout import TokenLayout
from regard.parts.state import PerToken, State


class Placement(NamedTuple):
    rows: Tensor  # (B, 1)
    slots: Tensor  # (B, L) of the new tokens
    span: int  # slots that are read
    keys: KeyLayout  # of the slots that are read


class Contiguous:
    def __init__(
        self, memory: ModelMemory, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        source: int = 0, slack: int = SLACK,
    ):  # fmt: skip
        check_sizes(rows, capacity, slack)
        self.rows, self.capacity, self.max_tokens = rows, capacity, capacity
        self.table = RowTable(rows, device, memory)
        self.storages = build_storages(
            memory, self.table, capacity, slack, source, dtype,
            lambda declared: ContiguousStorage(declared, self, dtype),
        )  # fmt: skip
        self.per_token = [storage for storage in self.storages if isinstance(storage, ContiguousStorage)]

    def begin_forward(
        self, layout: TokenLayout, span: int | None = None, check: bool = True
    ) -> tuple[tuple[State, ...], ...]:
        sourceless: list[int] = []
        if check and not torch.compiler.is_compiling():
            rewinds, sourceless = self.table.check(layout, self.capacity)
            for row, start in rewinds:
                self.rewind(row, start)
        self.table.advance(layout)
        return self.storages.bind(layout, span or self.capacity, sourceless)

    def place(self, layout: TokenLayout, span: int) -> Placement:
        rows = row_indices(layout)
        slots = layout.positions if layout.valid is None else layout.positions.where(layout.valid, self.capacity)
        keys = torch.arange(span, device=rows.device).expand(len(rows), span)
        return Placement(rows.unsqueeze(-1), slots, span, KeyLayout(keys))

    def reserve(self, row: int, length: int) -> bool:
        return length <= self.capacity

    def snapshot(self, row: int) -> Snapshot:
        return self.table.snapshot(row)

    def rewind(self, row: int, length: int, snapshot: Snapshot | None = None) -> None:
        self.table.check_row(row)
        stop = int(self.table.lengths[row])
        self.table.rewind(row, length, snapshot)
        self.clear(row, length, stop)

    def fork(self, row: int, to: int, snapshot: Snapshot) -> bool:
        self.table.check_row(row)
        self.table.check_row(to)
        self.table.fork(row, to, snapshot)
        for storage in self.per_token:
            storage.copy(row, to, snapshot.length)
        return True

    def release(self, row: int) -> None:
        self.table.check_row(row)
        self.clear(row, 0, int(self.table.lengths[row]))
        self.table.release(row)

    def clear(self, row: int, start: int, stop: int) -> None:
        for storage in self.per_token:
            storage.clear(row, start, stop)

    def metrics(self) -> dict[str, int]:
        return {}


class ContiguousStorage:
    def __init__(self, declared: PerToken, store: Contiguous, dtype: torch.dtype):
        self.placer = store
        self.arrays = {  # one slot more than the capacity, for invalid tokens
            name: torch.zeros(store.rows, heads, store.capacity + 1, dim, dtype=dtype, device=store.table.device)
            for name, (heads, dim) in declared.arrays.items()
        }

    def bind(self, layout: TokenLayout, placement: Placement) -> "ContiguousState":
        return ContiguousState(self, placement)

    def copy(self, row: int, to: int, stop: int) -> None:
        for array in self.arrays.values():
            array[to, :, :stop] = array[row, :, :stop]

    def clear(self, row: int, start: int, stop: int) -> None:
        for array in self.arrays.values():
            array[row, :, start:stop] = 0


class ContiguousState(NamedTuple):
    storage: ContiguousStorage
    placement: Placement

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        rows, slots, span, keys = self.placement
        cached = []
        for name, new in arrays.items():
            array = self.storage.arrays[name]  # (rows, heads, capacity + 1, dim)
            array[rows, :, slots] = new.transpose(1, 2)
            cached.append(array[rows_of(layout), :, :span])
        return (*cached, keys.attach(layout))
