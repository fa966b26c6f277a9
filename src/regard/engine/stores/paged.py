"""The paged store: keys live in blocks of a common pool, and a table says which blocks a row owns.

    slot(row, t) = table[row, t // block] · block + t mod block

A row takes blocks as it grows and gives them back when it ends, so memory is bounded by the tokens that are there, not
by rows times capacity. Block 0 belongs to nobody: invalid tokens are written there. Kwon et al. 2023, PagedAttention.
"""

import torch
from torch import Tensor

from regard.engine.stores.ring import SLACK
from regard.engine.stores.row_table import RowTable
from regard.engine.stores.snapshot import CannotRewind, Snapshot
from regard.engine.stores.states import build_states, leaves
from regard.kernels.attention.pages import Pages, gathered
from regard.layout import TokenLayout
from regard.parts.state import PerToken


class Paged:
    def __init__(
        self, memory, rows: int, capacity: int, blocks: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        block: int = 16, source: int = 0, slack: int = SLACK,
    ):  # fmt: skip
        self.rows, self.block = rows, block
        self.capacity = -(-capacity // block) * block
        self.span = self.capacity
        self.table = torch.zeros(rows, self.capacity // block, dtype=torch.int64, device=device)
        self.blocks = blocks
        self.free = list(range(blocks, 0, -1))  # block 0 is nobody's
        self.owned: list[list[int]] = [[] for _ in range(rows)]
        self.owners = [0] * (blocks + 1)  # rows that own a block: more than one share a prefix
        self.past = RowTable(rows, device)
        self.states = build_states(
            memory, self.past, self.capacity, slack, source, dtype, lambda declared: PagedState(declared, self, dtype)
        )
        self.in_pages = [state for state in leaves(self.states) if isinstance(state, PagedState)]

    def reserve(self, row: int, length: int) -> bool:
        """Make room for this many tokens of a row; False, and nothing taken, when the pool has too few blocks."""
        need = -(-length // self.block) - len(self.owned[row])
        if length > self.capacity or need > len(self.free):
            return False
        self.own(row, [self.free.pop() for _ in range(need)])
        return True

    def snapshot(self, row: int) -> Snapshot:
        """What rewind and fork need where a layer does not keep all its tokens."""
        return self.past.snapshot(row)

    def rewind(self, row: int, length: int, snapshot: Snapshot | None = None) -> None:
        """Forget a row's tokens from this position on and give back whole blocks.

        CannotRewind where a layer cannot without a snapshot.
        """
        whole, rest = divmod(length, self.block)
        last = self.owned[row][whole : whole + 1] if rest else []
        shared = any(self.owners[block] > 1 for block in last)
        if shared and not self.free:
            raise CannotRewind(f"row {row} shares the block of token {length}, and no block is free for a copy of it")
        self.past.rewind(row, length, snapshot)
        if shared:  # it will write where another row reads
            self.give_back(row, whole)
            self.own(row, [self.copy(*last, rest)])
        else:
            self.give_back(row, whole + len(last))
            self.clear(last, rest)

    def fork(self, row: int, to: int, snapshot: Snapshot) -> bool:
        """Let another row, which has no room yet, go on from a snapshot of this one; False when the pool is empty.

        They share whole blocks; of one that is not full, to which both will write, it gets a copy.
        """
        whole, rest = divmod(snapshot.length, self.block)
        if self.owned[to]:
            raise ValueError(f"row {to} has {len(self.owned[to])} blocks of its own; release it first")
        if rest and not self.free:
            return False
        self.past.fork(row, to, snapshot)
        self.own(to, self.owned[row][:whole])
        if rest:
            self.own(to, [self.copy(self.owned[row][whole], rest)])
        return True

    def release(self, row: int) -> None:
        """Give a row's blocks back, and its source."""
        self.give_back(row, 0)
        self.past.release(row)

    def own(self, row: int, blocks: list[int]) -> None:
        """Behind those that it has."""
        if blocks:
            have = len(self.owned[row])
            self.table[row, have : have + len(blocks)] = torch.tensor(blocks, device=self.table.device)
            self.owned[row] += blocks
            for block in blocks:
                self.owners[block] += 1

    def give_back(self, row: int, keep: int) -> None:
        """All but the first `keep` blocks; those that nobody else owns are free again."""
        gone = self.owned[row][keep:]
        for block in gone:
            self.owners[block] -= 1
        free = [block for block in gone if not self.owners[block]]
        self.clear(free)
        self.free += reversed(free)
        self.owned[row] = self.owned[row][:keep]
        self.table[row, keep:] = 0

    def clear(self, blocks: list[int], start: int = 0) -> None:
        """What is kept in these blocks, from this slot of theirs on."""
        slots = self.slots(torch.tensor(blocks, dtype=torch.int64, device=self.table.device))[start:]
        for state in self.in_pages:
            state.clear(slots)

    def copy(self, block: int, tokens: int) -> int:
        """A free block with what the first tokens of this one left there."""
        new = self.free.pop()
        some, to = self.slots(torch.tensor([[block], [new]], device=self.table.device))[:, :tokens]
        for state in self.in_pages:
            state.copy(some, to)
        return new

    def slots(self, blocks: Tensor) -> Tensor:
        """(…, n) blocks -> (…, n · block) their slots."""
        return (blocks.unsqueeze(-1) * self.block + torch.arange(self.block, device=blocks.device)).flatten(-2)


class PagedState:
    def __init__(self, declared: PerToken, store: Paged, dtype: torch.dtype):
        self.store, self.as_pages = store, declared.pages
        self.pages = {
            name: torch.zeros((store.blocks + 1) * store.block, heads, dim, dtype=dtype, device=store.past.device)
            for name, (heads, dim) in declared.arrays.items()
        }

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        self.store.past.note(layout)
        slots, table = layout.once((self.store, "place"), lambda: self.place(layout))
        kept = []
        for name, new in arrays.items():
            pages = self.pages[name]  # (slots, heads, dim)
            if layout.valid is not None:  # rows read the slot of invalid tokens too, unseen: it must stay finite
                new = new.masked_fill(~layout.valid[:, None, :, None], 0)
            pages[slots] = new.transpose(1, 2)
            kept.append(Pages(pages, table, self.store.block))  # (B, heads, S, dim)
        span = table.shape[1] * self.store.block
        keys = layout.once(
            (self.store, "keys"),
            lambda: layout.with_keys(torch.arange(span, device=slots.device).expand(len(slots), span)),
        )
        return (*(kept if self.as_pages else map(gathered, kept)), keys)

    def clear(self, slots: Tensor) -> None:
        for pages in self.pages.values():
            pages[slots] = 0

    def copy(self, some: Tensor, to: Tensor) -> None:
        for pages in self.pages.values():
            pages[to] = pages[some]

    def place(self, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """(B, L) where the new tokens go, (B, n) the blocks of all that may be read."""
        block = self.store.block
        table = (
            self.store.table[: len(layout.positions)] if layout.rows is None else self.store.table[layout.rows]
        )  # (B, blocks)
        slots = table.gather(1, layout.positions // block) * block + layout.positions % block
        if layout.valid is not None:
            slots = slots.where(layout.valid, 0)
        return slots, table[:, : -(-self.store.span // block)]
