"""The paged store: keys and values are kept in blocks of a common pool, and a table lists the blocks of each row.

    slot(row, t) = table[row, t // block] · block + t mod block

A row takes blocks as it grows and frees them when it ends, so memory is bounded by the tokens that are kept, not by
rows times capacity. Block 0 belongs to no row: invalid tokens are written there. Kwon et al. 2023, PagedAttention.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.engine.stores.base import SLACK, CannotRewind, ModelMemory, Snapshot
from regard.engine.stores.rows import KeyLayout, RowTable, check_sizes
from regard.engine.stores.states import build_storages
from regard.kernels.attention.arguments import Pages, gather_pages
from regard.layout import TokenLayout
from regard.parts.state import PerToken, State

BLOCK = 16  # tokens per block


class PagedPlacement(NamedTuple):
    slots: Tensor  # (B, L) of the new tokens
    blocks: Tensor  # (B, n) blocks that are read
    keys: KeyLayout  # of the slots of these blocks


class Paged:
    def __init__(
        self, memory: ModelMemory, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        source: int = 0, slack: int = SLACK, *, blocks: int | None = None, block: int = BLOCK,
    ):  # fmt: skip
        """blocks: how many the pool has; None: enough for all rows at full capacity. block: tokens per block."""
        check_sizes(rows, capacity, slack)
        if block < 1:
            raise ValueError(f"paged store: block={block} must be positive")
        blocks = rows * -(-capacity // block) if blocks is None else blocks
        if blocks < 1:
            raise ValueError(f"paged store: blocks={blocks} must be positive")
        self.rows, self.block = rows, block
        self.capacity = -(-capacity // block) * block
        self.max_tokens = min(capacity, blocks * block)
        self.block_table = torch.zeros(rows, self.capacity // block, dtype=torch.int64, device=device)
        self.blocks = blocks
        self.free = list(range(blocks, 0, -1))  # block 0 belongs to no row
        self.owned: list[list[int]] = [[] for _ in range(rows)]
        self.owner_counts = [0] * (blocks + 1)  # rows that own each block: several rows share a prefix
        self.table = RowTable(rows, device, memory)
        self.storages = build_storages(
            memory, self.table, self.capacity, slack, source, dtype,
            lambda declared: PagedStorage(declared, self, dtype),
        )  # fmt: skip
        self.per_token = [storage for storage in self.storages if isinstance(storage, PagedStorage)]

    def begin_forward(
        self, layout: TokenLayout, span: int | None = None, check: bool = True
    ) -> tuple[tuple[State, ...], ...]:
        sourceless: list[int] = []
        if check and not torch.compiler.is_compiling():
            rewinds, sourceless = self.table.check(layout, self.capacity)
            self.check_reserved(layout)
            for row, start in rewinds:
                self.rewind_reserved(row, start)
        self.table.advance(layout)
        return self.storages.bind(layout, span or self.capacity, sourceless)

    def check_reserved(self, layout: TokenLayout) -> None:
        valid = torch.ones_like(layout.positions, dtype=torch.bool) if layout.valid is None else layout.valid
        ends = (layout.positions.where(valid, -1).amax(1) + 1).tolist()
        rows = range(len(ends)) if layout.rows is None else layout.rows.tolist()
        for row, end in zip(rows, ends, strict=True):
            if self.per_token and end > len(self.owned[row]) * self.block:
                raise ValueError(
                    f"row {row} has blocks for {len(self.owned[row]) * self.block} tokens, but {end} are needed; "
                    f"call reserve({row}, {end}) first"
                )

    def place(self, layout: TokenLayout, span: int) -> PagedPlacement:
        table = self.block_table[: len(layout.positions)] if layout.rows is None else self.block_table[layout.rows]
        slots = table.gather(1, layout.positions // self.block) * self.block + layout.positions % self.block
        if layout.valid is not None:
            slots = slots.where(layout.valid, 0)
        blocks = table[:, : -(-span // self.block)]
        span = blocks.shape[1] * self.block
        keys = torch.arange(span, device=slots.device).expand(len(slots), span)
        return PagedPlacement(slots, blocks, KeyLayout(keys))

    def reserve(self, row: int, length: int) -> bool:
        missing = -(-length // self.block) - len(self.owned[row])
        if length > self.capacity or missing > len(self.free):
            return False
        self.own(row, [self.free.pop() for _ in range(missing)])
        return True

    def snapshot(self, row: int) -> Snapshot:
        return self.table.snapshot(row)

    def rewind(self, row: int, length: int, snapshot: Snapshot | None = None) -> None:
        """Drop a row's tokens from this position on and free whole blocks."""
        self.table.check_row(row)
        full, remainder = divmod(length, self.block)
        last = self.owned[row][full : full + 1] if remainder else []
        shared = any(self.owner_counts[block] > 1 for block in last)
        if shared and not self.free:
            raise CannotRewind(
                f"row {row} shares the block of token {length}, and no block is free for a copy; release a row first"
            )
        self.table.rewind(row, length, snapshot)
        if shared:  # the row will write into a block that another row reads
            self.free_blocks(row, full)
            self.own(row, [self.copy(*last, remainder)])
        else:
            self.free_blocks(row, full + len(last))
            self.clear(last, remainder)

    def rewind_reserved(self, row: int, length: int) -> None:
        """Rewind, but keep as many blocks reserved; blocks that other rows share are replaced, not overwritten."""
        reserved = len(self.owned[row])
        shared = sum(self.owner_counts[block] > 1 for block in self.owned[row][length // self.block :])
        if shared > len(self.free):
            raise CannotRewind(
                f"row {row} shares {shared} blocks from token {length} on with other rows, but {len(self.free)} are "
                "free for its new tokens; release a row first"
            )
        self.rewind(row, length)
        self.reserve(row, reserved * self.block)

    def fork(self, row: int, to: int, snapshot: Snapshot) -> bool:
        """Share the full blocks of the prefix, and copy a last block that is not full: both rows will write to it."""
        self.table.check_row(row)
        self.table.check_row(to)
        full, remainder = divmod(snapshot.length, self.block)
        if self.owned[to]:
            raise ValueError(f"row {to} already has {len(self.owned[to])} blocks; release it first")
        if remainder and not self.free:
            return False
        self.table.fork(row, to, snapshot)
        self.own(to, self.owned[row][:full])
        if remainder:
            self.own(to, [self.copy(self.owned[row][full], remainder)])
        return True

    def release(self, row: int) -> None:
        self.table.check_row(row)
        self.free_blocks(row, 0)
        self.table.release(row)

    def own(self, row: int, blocks: list[int]) -> None:
        """Append these blocks to those of a row."""
        if blocks:
            end = len(self.owned[row])
            self.block_table[row, end : end + len(blocks)] = torch.tensor(blocks, device=self.block_table.device)
            self.owned[row] += blocks
            for block in blocks:
                self.owner_counts[block] += 1

    def free_blocks(self, row: int, keep: int) -> None:
        """Remove all but the first `keep` blocks from a row; blocks that no other row owns become free."""
        removed = self.owned[row][keep:]
        for block in removed:
            self.owner_counts[block] -= 1
        free = [block for block in removed if not self.owner_counts[block]]
        self.clear(free)
        self.free += reversed(free)
        self.owned[row] = self.owned[row][:keep]
        self.block_table[row, keep:] = 0

    def clear(self, blocks: list[int], start: int = 0) -> None:
        """Zero these blocks from slot `start` of each on."""
        slots = self.slots(torch.tensor(blocks, dtype=torch.int64, device=self.block_table.device))[start:]
        for storage in self.per_token:
            storage.clear(slots)

    def copy(self, block: int, tokens: int) -> int:
        """Copy the first tokens of a block into a free one and return it."""
        new = self.free.pop()
        old, to = self.slots(torch.tensor([[block], [new]], device=self.block_table.device))[:, :tokens]
        for storage in self.per_token:
            storage.copy(old, to)
        return new

    def slots(self, blocks: Tensor) -> Tensor:
        """(…, n) blocks -> (…, n · block) their slots."""
        return (blocks.unsqueeze(-1) * self.block + torch.arange(self.block, device=blocks.device)).flatten(-2)

    def metrics(self) -> dict[str, int]:
        return {"blocks": self.blocks, "free_blocks": len(self.free)}


class PagedStorage:
    def __init__(self, declared: PerToken, store: Paged, dtype: torch.dtype):
        self.placer, self.block, self.as_pages = store, store.block, declared.pages
        slots = (store.blocks + 1) * store.block
        self.arrays = {
            name: torch.zeros(slots, heads, dim, dtype=dtype, device=store.table.device)
            for name, (heads, dim) in declared.arrays.items()
        }

    def bind(self, layout: TokenLayout, placement: PagedPlacement) -> "PagedState":
        return PagedState(self, placement)

    def clear(self, slots: Tensor) -> None:
        for array in self.arrays.values():
            array[slots] = 0

    def copy(self, slots: Tensor, to: Tensor) -> None:
        for array in self.arrays.values():
            array[to] = array[slots]


class PagedState(NamedTuple):
    storage: PagedStorage
    placement: PagedPlacement

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        slots, blocks, keys = self.placement
        cached = []
        for name, new in arrays.items():
            array = self.storage.arrays[name]  # (slots, heads, dim)
            if layout.valid is not None:  # block 0 is read too, masked: it must stay finite
                new = new.masked_fill(~layout.valid[:, None, :, None], 0)
            array[slots] = new.transpose(1, 2)
            cached.append(Pages(array, blocks, self.storage.block))  # (B, heads, S, dim)
        return (*(cached if self.storage.as_pages else map(gather_pages, cached)), keys.attach(layout))
