"""The paged store: keys live in blocks of a common pool, and a table says which blocks a row owns.

    slot(row, t) = table[row, t // block] · block + t mod block

A row takes blocks as it grows and gives them back when it ends, so memory is bounded by the tokens that are there, not
by rows times capacity. Block 0 belongs to nobody: invalid tokens are written there. Kwon et al. 2023, PagedAttention.
"""

from itertools import chain

import torch
from torch import Tensor

from regard.at import At
from regard.engine.stores.fixed import build_states, forget_source, parts, refuse_rewind
from regard.parts.state import PerToken


class Paged:
    def __init__(
        self, memory, rows: int, capacity: int, blocks: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        block: int = 16, source: int = 0,
    ):  # fmt: skip
        self.rows, self.block = rows, block
        self.capacity = -(-capacity // block) * block
        self.span = self.capacity
        self.table = torch.zeros(rows, self.capacity // block, dtype=torch.int64, device=device)
        self.blocks = blocks
        self.free = list(range(blocks, 0, -1))  # block 0 is nobody's
        self.owned: list[list[int]] = [[] for _ in range(rows)]
        self.states = build_states(
            memory,
            lambda declared: PagedState(self, declared, dtype, device),
            rows, source, dtype, device,
        )  # fmt: skip

    def reserve(self, row: int, length: int) -> bool:
        """Make room for this many tokens of a row; False, and nothing taken, when the pool has too few blocks."""
        have = len(self.owned[row])
        need = -(-length // self.block) - have
        if length > self.capacity or need > len(self.free):
            return False
        if need > 0:
            taken = [self.free.pop() for _ in range(need)]
            self.owned[row] += taken
            self.table[row, have : have + need] = torch.tensor(taken, device=self.table.device)
        return True

    def rewind(self, row: int, length: int) -> None:
        """Forget a row's tokens from this position on and give back whole blocks; CannotRewind where a layer cannot."""
        refuse_rewind(self.states)
        self.give_back(row, -(-length // self.block))

    def release(self, row: int) -> None:
        """Give a row's blocks back, and its source."""
        self.give_back(row, 0)
        forget_source(self.states, row)

    def give_back(self, row: int, keep: int) -> None:
        """All but the first `keep` blocks."""
        slots = self.slots(self.table[row, keep : len(self.owned[row])])
        for state in chain(*map(parts, self.states)):
            if isinstance(state, PagedState):
                state.clear(slots)
        self.free += reversed(self.owned[row][keep:])
        self.owned[row] = self.owned[row][:keep]
        self.table[row, keep:] = 0

    def slots(self, blocks: Tensor) -> Tensor:
        """(…, n) blocks -> (…, n · block) their slots."""
        return (blocks.unsqueeze(-1) * self.block + torch.arange(self.block, device=blocks.device)).flatten(-2)


class PagedState:
    def __init__(self, store: Paged, declared: PerToken, dtype: torch.dtype, device: torch.device | str):
        self.store = store
        self.pages = {
            name: torch.zeros((store.blocks + 1) * store.block, heads, dim, dtype=dtype, device=device)
            for name, (heads, dim) in declared.arrays.items()
        }

    def extend(self, at: At, **arrays: Tensor) -> tuple:
        slots, key_slots = at.once("paged", lambda: self.place(at))
        kept = []
        for name, new in arrays.items():
            pages = self.pages[name]  # (slots, heads, dim)
            if at.valid is not None:  # rows read the slot of invalid tokens too, unseen: it must stay finite
                new = new.masked_fill(~at.valid[:, None, :, None], 0)
            pages[slots] = new.transpose(1, 2)
            kept.append(pages[key_slots].transpose(1, 2))  # (B, heads, S, dim)
        span = key_slots.shape[1]
        keys = at.once("keys", lambda: at.with_keys(torch.arange(span, device=slots.device).expand(key_slots.shape)))
        return (*kept, keys)

    def clear(self, slots: Tensor) -> None:
        for pages in self.pages.values():
            pages[slots] = 0

    def place(self, at: At) -> tuple[Tensor, Tensor]:
        """(B, L) where the new tokens go, (B, S) where all that may be read lies."""
        block = self.store.block
        table = self.store.table[: len(at.positions)] if at.rows is None else self.store.table[at.rows]  # (B, blocks)
        slots = table.gather(1, at.positions // block) * block + at.positions % block
        if at.valid is not None:
            slots = slots.where(at.valid, 0)
        return slots, self.store.slots(table[:, : -(-self.store.span // block)])
