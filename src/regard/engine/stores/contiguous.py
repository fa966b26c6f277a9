"""The contiguous store: every row has its full capacity from the start, position t in slot t."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engine.stores.arrays import encoding_of, zeros
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
    in_place = False

    def __init__(
        self, memory: ModelMemory, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        source: int = 0, slack: int = SLACK,
    ):  # fmt: skip
        check_sizes(rows, capacity, slack)
        self.rows, self.capacity, self.max_tokens = rows, capacity, capacity
        self.shared_block, self.prompt_border = 0, 1
        self.table = RowTable(rows, device, memory)
        self.storages = build_storages(
            memory, self.table, capacity, slack, source, dtype,
            lambda declared: ContiguousStorage(declared, self, dtype),
        )  # fmt: skip
        self.per_token = [storage for storage in self.storages if isinstance(storage, ContiguousStorage)]
        self.needs_snapshots = self.table.needs_snapshots
        self.max_span = capacity if self.per_token else 1

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

    def admit(
        self, row: int, tokens: Sequence[int | bytes], namespace: object = None, prompt: int | None = None
    ) -> int | None:
        if not self.reserve(row, len(tokens)):
            return None
        self.table.prompts[row] = len(tokens) if prompt is None else prompt
        return 0

    def commit(self, row: int, tokens: Sequence[int | bytes], length: int, copy_state: bool = False) -> None:
        pass  # rows share nothing

    def forget(self, row: int | None = None) -> None:
        pass

    def upload(self) -> None:
        pass  # the slot of a token depends on its position alone

    def reserve(self, row: int, length: int) -> bool:
        if length > self.capacity:
            return False
        self.table.bounds[row] = max(self.table.bounds[row], length)
        return True

    def snapshot(self, row: int) -> Snapshot:
        return self.table.snapshot(row)

    def rewind(self, row: int, length: int, snapshot: Snapshot | None = None) -> None:
        self.table.check_row(row)
        self.table.rewind(row, length, snapshot)
        self.clear(row, length, self.table.bounds[row])

    def fork(self, row: int, to: int, snapshot: Snapshot) -> bool:
        self.table.check_row(row)
        self.table.check_row(to)
        self.table.fork(row, to, snapshot)
        for storage in self.per_token:
            storage.copy(row, to, snapshot.length)
        return True

    def release(self, row: int) -> None:
        self.table.check_row(row)
        self.clear(row, 0, self.table.bounds[row])
        self.table.release(row)
        self.table.bounds[row] = 0

    def clear(self, row: int, start: int, stop: int) -> None:
        for storage in self.per_token:
            storage.clear(row, start, stop)

    def metrics(self) -> dict[str, int]:
        return {}

    def check(self) -> None:
        for row, (length, bound) in enumerate(zip(self.table.lengths.tolist(), self.table.bounds, strict=True)):
            assert length <= bound <= self.capacity, f"row {row}: its length {length} is within its bound {bound}"
            for array in (array for storage in self.per_token for array in storage.arrays.values()):
                assert not array[row, :, bound : self.capacity].any(), f"row {row}: slots past its end are zero"


class ContiguousStorage:
    def __init__(self, declared: PerToken, store: Contiguous, dtype: torch.dtype):
        self.placer, self.encoding = store, encoding_of(declared, dtype)
        self.arrays = {  # one slot more than the capacity, for invalid tokens
            name: zeros((store.rows, heads, store.capacity + 1, dim), part_dtype, store.table.device)
            for name, heads, dim, part_dtype in self.encoding.parts(declared)
        }

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> "ContiguousState":
        return ContiguousState(self, placements[self.placer])

    def copy(self, row: int, to: int, stop: int) -> None:
        for array in self.arrays.values():
            array[to, :, :stop] = array[row, :, :stop]

    def clear(self, row: int, start: int, stop: int) -> None:
        for array in self.arrays.values():
            array[row, :, start:stop] = 0


class ContiguousState(NamedTuple):
    storage: ContiguousStorage
    placement: Placement

    def pages(self, layout: TokenLayout, *names: str) -> None:
        return None

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        rows, slots, span, keys = self.placement
        cached, encoding = [], self.storage.encoding
        for name, new in arrays.items():
            parts = encoding.encode(name, new)
            for part, x in parts.items():
                array = self.storage.arrays[part]  # (rows, heads, capacity + 1, dim)
                array[rows, :, slots] = x.transpose(1, 2)
                parts[part] = array[rows_of(layout), :, :span]
            cached.append(encoding.decode(name, parts))
        return (*cached, keys.attach(layout))
