"""The contiguous store: every row has its full capacity from the start, position t in slot t."""

from itertools import chain

import torch
from torch import Tensor

from regard.at import At
from regard.engine.stores.fixed import build_states, forget_source, parts, refuse_rewind
from regard.parts.state import PerToken


class Contiguous:
    def __init__(
        self, memory, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        source: int = 0,
    ):  # fmt: skip
        self.rows, self.capacity, self.span = rows, capacity, capacity
        self.lengths = [0] * rows  # tokens that each row may have written
        self.states = build_states(
            memory,
            lambda declared: ContiguousState(self, declared, dtype, device),
            rows, source, dtype, device,
        )  # fmt: skip

    def reserve(self, row: int, length: int) -> bool:
        """Make room for this many tokens of a row; False when there is none."""
        if length > self.capacity:
            return False
        self.lengths[row] = max(length, self.lengths[row])
        return True

    def rewind(self, row: int, length: int) -> None:
        """Forget a row's tokens from this position on; CannotRewind where a layer cannot."""
        refuse_rewind(self.states)
        self.clear(row, length)

    def release(self, row: int) -> None:
        """Give a row's room back, and its source."""
        self.clear(row, 0)
        forget_source(self.states, row)

    def clear(self, row: int, start: int) -> None:
        for state in chain(*map(parts, self.states)):
            if isinstance(state, ContiguousState):
                state.clear(row, start, self.lengths[row])
        self.lengths[row] = min(start, self.lengths[row])


class ContiguousState:
    def __init__(self, store: Contiguous, declared: PerToken, dtype: torch.dtype, device: torch.device | str):
        self.store = store
        self.arrays = {  # one slot more than the capacity: invalid tokens are written there
            name: torch.zeros(store.rows, heads, store.capacity + 1, dim, dtype=dtype, device=device)
            for name, (heads, dim) in declared.arrays.items()
        }

    def extend(self, at: At, **arrays: Tensor) -> tuple:
        rows, slots = at.once("contiguous", lambda: self.place(at))
        span = self.store.span
        kept = []
        for name, new in arrays.items():
            array = self.arrays[name]  # (rows, heads, capacity + 1, dim)
            array[rows, :, slots] = new.transpose(1, 2)
            kept.append(array[: len(new), :, :span] if at.rows is None else array[at.rows, :, :span])
        keys = at.once("keys", lambda: at.with_keys(torch.arange(span, device=rows.device).expand(len(rows), span)))
        return (*kept, keys)

    def clear(self, row: int, start: int, stop: int) -> None:
        for array in self.arrays.values():
            array[row, :, start:stop] = 0

    def place(self, at: At) -> tuple[Tensor, Tensor]:
        batch = len(at.positions)
        rows = torch.arange(batch, device=at.positions.device) if at.rows is None else at.rows
        slots = at.positions if at.valid is None else at.positions.where(at.valid, self.store.capacity)
        return rows.unsqueeze(-1), slots  # (B, 1), (B, L)
