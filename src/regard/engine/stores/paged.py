"""The paged store: keys and values are kept in blocks of a common pool, and a table lists the blocks of each row.

    slot(row, t) = table[row, t // block] · block + t mod block

A row takes blocks as it grows and frees them when it ends, so memory is bounded by the tokens that are kept, not by
rows times capacity. Full blocks stay in the pool after their row has ended, and a request that starts with the same
tokens shares them (blocks.py). Block 0 belongs to no row: invalid tokens are written there. Kwon et al. 2023,
PagedAttention.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engine.stores.arrays import encoding_of, zeros
from regard.engine.stores.base import SLACK, CannotRewind, ModelMemory, Snapshot
from regard.engine.stores.blocks import BlockPool
from regard.engine.stores.rows import KeyLayout, RowTable, check_sizes
from regard.engine.stores.states import build_storages
from regard.kernels.attention.arguments import Pages, gather_pages
from regard.layout import TokenLayout, to_device
from regard.parts.state import PerToken, State

BLOCK = 16  # tokens per block
FEW_BLOCKS = 4  # are cleared in all arrays by one kernel; more take a kernel per array
EVICTED_SHARE = 32  # 1 / 32 of the blocks are evicted at a time: clearing them costs a kernel per array


class PagedPlacement(NamedTuple):
    slots: Tensor  # (B, L) of the new tokens
    blocks: Tensor  # (B, n) blocks that are read
    keys: KeyLayout  # of the slots of these blocks


class Paged:
    def __init__(
        self, memory: ModelMemory, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        source: int = 0, slack: int = SLACK, *, blocks: int | None = None, block: int = BLOCK,
        states: int | None = None,
    ):  # fmt: skip
        """blocks: how many the pool has; None: enough for all rows at full capacity. block: tokens per block.

        states: copies of recurrent states and ring buffers that are kept for reused prefixes; None: four per row.
        """
        check_sizes(rows, capacity, slack)
        if block < 1:
            raise ValueError(f"paged store: block={block} must be positive")
        blocks = rows * -(-capacity // block) if blocks is None else blocks
        if blocks < 1:
            raise ValueError(f"paged store: blocks={blocks} must be positive")
        if states is not None and states < 0:
            raise ValueError(f"paged store: states={states} must be at least 0")
        self.rows, self.block, self.blocks = rows, block, blocks
        self.capacity = -(-capacity // block) * block
        self.max_tokens = min(capacity, blocks * block)
        self.block_table = torch.zeros(rows, self.capacity // block, dtype=torch.int64, device=device)
        self.changed: dict[int, int] = {}  # entries of the block table that the device does not have yet
        self.dirty: list[int] = []  # freed blocks that are not zeros yet; cleared together, before the next forward
        self.pool = BlockPool(blocks, block, rows, 4 * rows if states is None else states)
        self.owned = self.pool.owned
        self.table = RowTable(rows, device, memory)
        self.storages = build_storages(
            memory, self.table, self.capacity, slack, source, dtype,
            lambda declared: PagedStorage(declared, self, dtype),
        )  # fmt: skip
        self.per_token = [storage for storage in self.storages if isinstance(storage, PagedStorage)]
        self.in_place = all(storage.as_pages for storage in self.per_token)
        self.max_span = self.capacity
        self.shared_block = block
        self.needs_snapshots = self.table.needs_snapshots
        self.prompt_border = block if self.table.overwriting else 1
        self.prefix_queries = self.prefix_hits = 0

    def begin_forward(
        self, layout: TokenLayout, span: int | None = None, check: bool = True
    ) -> tuple[tuple[State, ...], ...]:
        sourceless: list[int] = []
        if not torch.compiler.is_compiling():
            if check:
                rewinds, sourceless = self.table.check(layout, self.capacity)
                self.check_reserved(layout)
                for row, start in rewinds:
                    self.rewind_reserved(row, start)
            self.upload()
        self.table.advance(layout)
        return self.storages.bind(layout, span or self.capacity, sourceless)

    def upload(self) -> None:
        if self.dirty:
            self.clear(self.dirty)
            self.dirty = []
        if self.changed:
            entries = self.on_device([list(self.changed), list(self.changed.values())])
            self.block_table.view(-1)[entries[0]] = entries[1]
            self.changed.clear()

    def on_device(self, numbers: Sequence) -> Tensor:
        return to_device(torch.tensor(numbers), self.block_table.device)

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

    def admit(
        self, row: int, tokens: Sequence[int | bytes], namespace: object = None, prompt: int | None = None
    ) -> int | None:
        if self.owned[row]:
            raise ValueError(f"row {row} already has {len(self.owned[row])} blocks; release it first")
        chain = [] if namespace is None else self.pool.lookup(namespace, tokens, bool(self.table.overwriting))
        unowned = sum(self.pool.by_key[key] in self.pool.cached for key in chain[1:])
        cached = max(0, len(chain) - 1)  # blocks
        missing = -(-len(tokens) // self.block) - cached
        if len(tokens) > self.capacity or missing > self.pool.available - unowned:
            return None
        if chain:
            self.pool.share(row, chain)
            self.list_blocks(row, 0)
            self.prefix_queries += len(tokens)
        if cached:
            self.table.restore(row, self.pool.states.get(chain[-1], []), cached * self.block)
            self.prefix_hits += cached * self.block
        self.take(row, missing)
        self.table.prompts[row] = len(tokens) if prompt is None else prompt
        return cached * self.block

    def commit(self, row: int, tokens: Sequence[int | bytes], length: int, copy_state: bool = False) -> None:
        self.pool.commit(row, tokens, length)
        if copy_state and self.table.overwriting and length % self.block == 0 and self.pool.chains[row]:
            self.pool.keep_state(self.pool.chains[row][-1], self.table.copy_state(row))

    def forget(self, row: int | None = None) -> None:
        self.dirty += self.pool.forget(list(self.pool.keys)) if row is None else self.pool.forget_row(row)

    def reserve(self, row: int, length: int) -> bool:
        missing = -(-length // self.block) - len(self.owned[row])
        if missing <= 0:
            return True
        if length > self.capacity or missing > self.pool.available:
            return False
        self.take(row, missing)
        return True

    def snapshot(self, row: int) -> Snapshot:
        return self.table.snapshot(row)

    def rewind(self, row: int, length: int, snapshot: Snapshot | None = None) -> None:
        """Drop a row's tokens from this position on and free whole blocks."""
        self.table.check_row(row)
        full, remainder = divmod(length, self.block)
        last = self.owned[row][full : full + 1] if remainder else []
        shared = any(self.pool.owner_counts[block] > 1 for block in last)
        if shared and not self.pool.available:
            raise CannotRewind(
                f"row {row} shares the block of token {length}, and no block is free for a copy; release a row first"
            )
        self.table.rewind(row, length, snapshot)
        if shared:  # the row will write into a block that another row reads
            self.free_blocks(row, full)
            self.copy(*last, row, remainder)
        else:
            self.free_blocks(row, full + len(last))
            self.pool.forget(last)  # the row will write into it, so its key no longer holds
            del self.pool.chains[row][full + 1 :]
            self.clear(last, remainder)

    def rewind_reserved(self, row: int, length: int) -> None:
        """Rewind a row without a snapshot, but keep as many blocks: free ones replace those that it shares."""
        reserved, kept = len(self.owned[row]), length // self.block
        shared = sum(self.pool.owner_counts[block] > 1 for block in self.owned[row][kept:])
        if shared > self.pool.available:
            raise CannotRewind(
                f"row {row} shares {shared} blocks that it would overwrite, but {self.pool.available} are "
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
        if remainder and not self.pool.available:
            return False
        self.table.fork(row, to, snapshot)
        self.pool.own(to, self.owned[row][:full])
        self.pool.chains[to] = self.pool.chains[row][: full + 1]
        self.list_blocks(to, 0)
        if remainder:
            self.copy(self.owned[row][full], to, remainder)
        return True

    def release(self, row: int) -> None:
        self.table.check_row(row)
        self.free_blocks(row, 0)
        self.pool.chains[row] = []
        self.table.release(row)

    def take(self, row: int, count: int) -> None:
        """Give free blocks to a row; cached ones are evicted if too few are free."""
        if count > 0:
            missing = count - len(self.pool.free)
            if missing > 0:
                self.dirty += self.pool.evict(max(missing, self.blocks // EVICTED_SHARE))
            start = len(self.owned[row])
            self.pool.own(row, self.pool.take(count))
            self.list_blocks(row, start)

    def list_blocks(self, row: int, start: int) -> None:
        """Write the row's blocks from this one on into the block table."""
        first = row * self.block_table.shape[1]
        self.changed.update(enumerate(self.owned[row][start:], first + start))

    def free_blocks(self, row: int, keep: int) -> None:
        """Remove all but the first `keep` blocks from a row; blocks that no other row owns become free."""
        first = row * self.block_table.shape[1]
        self.changed.update(dict.fromkeys(range(first + keep, first + len(self.owned[row])), 0))
        self.dirty += self.pool.release(row, keep)

    def clear(self, blocks: Sequence[int], start: int = 0) -> None:
        """Zero these blocks from slot `start` of each on: masked slots are read too, and 0 · NaN is NaN."""
        if not (blocks and self.per_token):
            return
        if len(blocks) <= FEW_BLOCKS:
            ends = [(block * self.block, (block + 1) * self.block) for block in blocks]
            ends[0] = (ends[0][0] + start, ends[0][1])
            arrays = [array for storage in self.per_token for array in storage.arrays.values()]
            torch._foreach_zero_([array[first:end] for array in arrays for first, end in ends])
            return
        slots = self.slots(self.on_device(blocks))[start:]
        for storage in self.per_token:
            storage.clear(slots)

    def copy(self, block: int, row: int, tokens: int) -> None:
        """Give a copy of the first tokens of a block to a row."""
        self.take(row, 1)
        self.upload()  # the block may be one that is not cleared yet
        old, to = block * self.block, self.owned[row][-1] * self.block
        if arrays := [array for storage in self.per_token for array in storage.arrays.values()]:
            torch._foreach_copy_(
                [array[to : to + tokens] for array in arrays], [array[old : old + tokens] for array in arrays]
            )

    def slots(self, blocks: Tensor) -> Tensor:
        """(…, n) blocks -> (…, n · block) their slots."""
        return (blocks.unsqueeze(-1) * self.block + torch.arange(self.block, device=blocks.device)).flatten(-2)

    def metrics(self) -> dict[str, int]:
        pool = self.pool
        return {
            "blocks": self.blocks, "free_blocks": pool.available, "cached_blocks": len(pool.cached),
            "cached_states": len(pool.states), "evicted_blocks": pool.evictions,
            "prefix_query_tokens": self.prefix_queries, "prefix_hit_tokens": self.prefix_hits,
        }  # fmt: skip

    def check(self) -> None:
        self.upload()
        self.pool.check()
        tables = [blocks + [0] * (self.block_table.shape[1] - len(blocks)) for blocks in self.owned]
        assert self.block_table.tolist() == tables, "the block table on the device lists the rows' blocks"
        for row, length in enumerate(self.table.lengths.tolist()):
            assert not self.per_token or length <= len(self.owned[row]) * self.block, (
                f"row {row} is longer than its blocks"
            )
        for array in (array for storage in self.per_token for array in storage.arrays.values()):
            blocks = array.unflatten(0, (-1, self.block))
            assert blocks[0].isfinite().all(), "block 0 is finite"
            assert not blocks[self.pool.free].any(), "free blocks are zero"


class PagedStorage:
    def __init__(self, declared: PerToken, store: Paged, dtype: torch.dtype):
        self.placer, self.block, self.as_pages = store, store.block, declared.pages
        slots = (store.blocks + 1) * store.block
        self.encoding = encoding_of(declared, dtype)
        self.arrays = {
            name: zeros((slots, heads, dim), part_dtype, store.table.device)
            for name, heads, dim, part_dtype in self.encoding.parts(declared)
        }

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> "PagedState":
        return PagedState(self, placements[self.placer])

    def clear(self, slots: Tensor) -> None:
        for array in self.arrays.values():
            array[slots] = 0


class PagedState(NamedTuple):
    storage: PagedStorage
    placement: PagedPlacement

    def pages(self, layout: TokenLayout, *names: str) -> list[Pages] | None:
        if self.storage.encoding.quantizes:
            return None
        return [Pages(self.storage.arrays[name], self.placement.blocks, self.storage.block) for name in names]

    def key_layout(self, layout: TokenLayout) -> TokenLayout:
        """The layout with the positions of the cached keys."""
        return self.placement.keys.attach(layout)

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        slots, blocks, keys = self.placement
        cached, encoding = [], self.storage.encoding
        for name, new in arrays.items():
            if layout.valid is not None:  # block 0 is read too, masked: it must stay finite
                new = new.masked_fill(~layout.valid[:, None, :, None], 0)
            parts: dict[str, Any] = encoding.encode(name, new)
            for part, x in parts.items():
                array = self.storage.arrays[part]  # (slots, heads, dim)
                array[slots] = x.transpose(1, 2)
                pages = Pages(array, blocks, self.storage.block)  # (B, heads, S, dim)
                parts[part] = pages if self.storage.as_pages else gather_pages(pages)
            cached.append(encoding.decode(name, parts))
        return (*cached, keys.attach(layout))
