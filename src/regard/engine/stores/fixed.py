"""States of fixed size, the sums of a recurrence: one array a row, the same in every store."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.at import At
from regard.parts.state import FRESH, Fixed, PerToken, State


class RowState:
    def __init__(self, declared: Fixed, rows: int, dtype: torch.dtype, device: torch.device | str):
        wide = torch.promote_types(dtype, torch.float32)
        self.array = torch.zeros(rows, *declared.shape, dtype=wide, device=device)

    def read(self, at: At, empty: Tensor) -> Tensor:
        at.refuse_packed()
        first = at.positions == 0 if at.valid is None else (at.positions == 0) & at.valid  # (B, L)
        begins = first.any(-1).view(-1, *[1] * (self.array.dim() - 1))
        return empty.where(begins, self.array[: len(empty)] if at.rows is None else self.array[at.rows])

    def write(self, at: At, array: Tensor) -> None:
        if at.rows is None:
            self.array[: len(array)] = array
        else:
            self.array[at.rows] = array


def build_states(
    memory, per_token: Callable[[PerToken], State], fixed: Callable[[Fixed], State]
) -> tuple[tuple[State, ...], ...]:
    """A state for each declaration, in the same nesting; what remembers nothing gets FRESH."""
    make = {PerToken: per_token, Fixed: fixed, type(None): lambda _: FRESH}
    return tuple(tuple(make[type(declared)](declared) for declared in block) for block in memory)
