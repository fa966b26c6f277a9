"""A store of the keys that queries attend to most: each kv head keeps tokens of its own, at their own positions.

    keys of a forward    the kept tokens of each head, then the new tokens
    scores               attention computes them and asks which keys count (TokenLayout.select)
    select               per block of queries: softmax over the tokens that are still kept, add the weights to the sums,
                         evict by a rule (eviction_rules.py)

The kept tokens of a head are in slots in the order of their positions, empty slots at the end. Their keys were rotated
when they were computed, so their positions are needed only to order them. Attention is computed by its equation: no
fused kernel returns the scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engine.stores.arrays import zeros
from regard.engine.stores.eviction_rules import EvictionRule, HeavyHitters
from regard.engine.stores.rows import RowTable, rows_of
from regard.kernels.attention.reference import normalize
from regard.layout import TokenLayout, to_device
from regard.parts.state import PerToken

EMPTY = -1
LATER = 2**31 - 1  # orders empty slots after all positions
STEP = 64  # slots are allocated in multiples of this


@dataclass(frozen=True)
class EvictedTokens(PerToken):
    """Per-token arrays of which a store keeps those that queries attend to most."""

    rewinds = False
    rule: EvictionRule = field(default_factory=lambda: HeavyHitters(512))


class EvictingSlots:
    """The slots of all layers with one rule: they hold equally many tokens, though different ones."""

    def __init__(self, rule: EvictionRule, rows: RowTable, capacity: int):
        # The meta device takes no memory: as many slots as a sequence may need.
        most = -(-capacity // STEP) * STEP if torch.device(rows.device).type == "meta" else 0
        self.rule, self.rows, self.slots = rule, rows, most if rule.slots is None else min(rule.slots, capacity)
        self.storages: list[EvictingStorage] = []
        self.held = [0] * len(rows)  # tokens in the slots of each row, after the last forward
        rows.overwriting.append(self)

    def place(self, layout: TokenLayout, span: int) -> Tensor:
        """Allocate slots for the tokens kept before and after this forward; returns the prompts' lengths (B, 1)."""
        prompts = self.rows.prompts
        if self.rule.slots is None:
            before, lengths = self.held, self.rows.lengths.tolist()
            self.held = [self.rule.kept(*row) for row in zip(lengths, prompts, strict=True)]
            self.resize(max(*before, *self.held))
        rows = range(len(layout.positions)) if layout.rows is None else layout.rows.tolist()
        chosen = torch.tensor([[prompts[row]] for row in rows])
        return to_device(chosen, layout.positions.device)

    def resize(self, slots: int) -> None:
        """Allocate at least this many slots per row; they shrink only to half of their number or less."""
        slots = -(-slots // STEP) * STEP
        if slots > self.slots or 2 * slots <= self.slots:
            self.slots = slots
            for storage in self.storages:
                storage.resize(slots)

    def row_arrays(self, row: int) -> list[Tensor]:
        return [array[row] for storage in self.storages for array in storage.slot_arrays()]

    def restore(self, row: int, copies: list[Tensor]) -> None:
        width = copies[0].shape[1]
        self.resize(max(width, self.slots))
        self.clear(row, 0)
        self.held[row] = width
        for old, new in zip(copies, self.row_arrays(row), strict=True):
            new[:, :width] = old

    def why_not_rewind(self, row: int, length: int) -> str:
        return "the cache may have evicted tokens because of the attention weights of later queries"

    def clear(self, row: int, start: int) -> None:
        for storage in self.storages:
            storage.positions[row].masked_fill_(storage.positions[row] >= start, EMPTY)
            if start == 0:  # masked slots are read too, and 0 · NaN is NaN
                for array in storage.arrays.values():
                    array[row] = 0
        if start == 0:
            self.held[row] = 0


class EvictingStorage:
    def __init__(self, declared: EvictedTokens, slots: EvictingSlots, dtype: torch.dtype):
        self.placer, self.rule, rows = slots, declared.rule, slots.rows
        heads = next(heads for heads, _ in declared.arrays.values())
        self.positions = torch.full((len(rows), heads, slots.slots), EMPTY, dtype=torch.int32, device=rows.device)
        wide = torch.promote_types(dtype, torch.float32)
        self.arrays = {
            name: zeros((len(rows), heads, slots.slots, dim), kind, rows.device)
            for name, dim, kind in (
                *((name, dim, dtype) for name, (_, dim) in declared.arrays.items()), ("received", 1, wide)
            )
        }  # fmt: skip
        slots.storages.append(self)

    def slot_arrays(self) -> list[Tensor]:
        """The arrays with slots as their third dimension."""
        return [self.positions, *self.arrays.values()]

    @torch.inference_mode(False)  # a row is also changed outside of inference
    def resize(self, slots: int) -> None:
        def resized(array: Tensor) -> Tensor:
            rows, heads, old, *dim = array.shape
            new = zeros((rows, heads, slots, *dim), array.dtype, array.device)
            new[:, :, : min(old, slots)] = array[:, :, :slots]
            return new

        old = self.positions.shape[2]
        self.positions = resized(self.positions)
        self.positions[:, :, old:] = EMPTY
        self.arrays = {name: resized(array) for name, array in self.arrays.items()}

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> "EvictingState":
        return EvictingState(self, placements[self.placer])


class EvictingState(NamedTuple):
    storage: EvictingStorage
    prompts: Tensor  # (B, 1)

    def pages(self, layout: TokenLayout, *names: str) -> None:
        return None

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        rows, slots = rows_of(layout), self.storage.positions.shape[2]
        joined = {name: torch.cat([self.storage.arrays[name][rows], new], 2) for name, new in arrays.items()}
        # The heads keep keys of different positions, so all get position 0, to which every query attends.
        earlier = torch.zeros(len(layout.positions), slots, dtype=torch.int64, device=layout.positions.device)
        valid = (
            None if layout.valid is None else torch.cat([torch.ones_like(earlier, dtype=torch.bool), layout.valid], 1)
        )
        selection = KeySelection(self.storage, layout, self.prompts, joined)
        keys = layout.with_keys(torch.cat([earlier, layout.positions], 1), valid, select=selection.select)
        return (*joined.values(), keys)


class KeySelection(NamedTuple):
    """The keys of one layer in one forward."""

    storage: EvictingStorage
    layout: TokenLayout  # of the queries
    prompts: Tensor  # (B, 1)
    arrays: dict[str, Tensor]  # (B, K, S, dim) of the kept tokens and the new ones

    def select(self, s: Tensor, allowed: Tensor | None, sinks: Tensor | None) -> Tensor:
        """(B, H, L, S): as SelectKeys. Afterwards the storage holds the tokens that are kept."""
        rule, queries = self.storage.rule, self.layout.positions
        valid = torch.ones_like(queries, dtype=torch.bool) if self.layout.valid is None else self.layout.valid
        positions, received = self.positions_and_sums(valid)  # (B, K, S) each
        kv_heads, group = positions.shape[1], s.shape[1] // positions.shape[1]
        allowed = torch.ones_like(s[:, :1], dtype=torch.bool) if allowed is None else allowed
        numbers = rule.blocks(queries, self.prompts)  # (B, L)
        numbers = numbers - numbers.where(valid, LATER).amin(1, keepdim=True)
        kept = []  # before each block
        for block in range(count := rule.max_blocks(queries.shape[1])):
            kept.append(positions >= 0)
            inside = valid & (numbers == block)  # (B, L)
            weights = normalize(s, allowed & kept[-1].repeat_interleave(group, 1).unsqueeze(2), sinks)  # (B, H, L, S)
            counted = inside & rule.counts(queries, self.prompts)
            sums = (weights * counted[:, None, :, None]).sum(2)  # (B, H, S)
            received = received + sums.unflatten(1, (kv_heads, group)).sum(2)
            ends = inside & rule.ends_block(queries, self.prompts)
            last = queries.where(ends, EMPTY).amax(1)[:, None, None]  # (B, 1, 1), EMPTY if no block ends
            past = positions.where(positions <= last, EMPTY)
            evicted = (past >= 0) & ~rule.keep(past, received, last)
            positions = positions.masked_fill(evicted, EMPTY)
        self.store(positions, received)
        of_block = numbers.clamp(0, count - 1)[:, :, None, None].expand(-1, -1, *positions.shape[1:])  # (B, L, K, S)
        kept = torch.stack(kept, 1).gather(1, of_block).transpose(1, 2)  # (B, K, L, S)
        return allowed & kept.repeat_interleave(group, 1)

    def positions_and_sums(self, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Of the kept tokens and the new ones."""
        rows, storage = rows_of(self.layout), self.storage
        old, sums = storage.positions[rows], storage.arrays["received"][rows].squeeze(-1)  # (B, K, slots)
        sums = sums.where(old >= 0, 0.0)  # an empty slot may hold the sum of an evicted token
        new = self.layout.positions.where(valid, EMPTY).to(old.dtype)[:, None].expand(-1, old.shape[1], -1)
        return torch.cat([old, new], 2), torch.cat([sums, torch.zeros_like(new, dtype=sums.dtype)], 2)

    def store(self, positions: Tensor, received: Tensor) -> None:
        """Keep the tokens whose position is not EMPTY, in order."""
        rows, storage = rows_of(self.layout), self.storage
        order = positions.where(positions >= 0, LATER).argsort(-1)[..., : storage.positions.shape[2]]  # (B, K, slots)
        storage.positions[rows] = positions.gather(-1, order)
        for name, array in (*self.arrays.items(), ("received", received.unsqueeze(-1))):
            index = order.unsqueeze(-1).expand(-1, -1, -1, array.shape[-1])
            storage.arrays[name][rows] = array.gather(2, index)
