"""The blocks of a paged store's pool, without their contents: free, owned by rows, or cached for reuse.

    free ── take ──▶ owned ── release ──▶ free, or cached if the block has a key
                       ▲                                   │
                       ├── share: an equal prefix ─────────┤
    free ◀─────────────┼── evict: least recently used ─────┘

A full block gets a key once its contents are computed: a hash of its tokens and of the key of the block before it, so
equal keys mean equal prefixes. The first hash is of the namespace: only requests of one namespace share blocks. A row's
`chain` lists these keys. Layers that do not keep all tokens (recurrences, ring buffers) can continue a prefix only
where their state was copied; the most recently used copies are kept, by the key of the last block. Kwon et al. 2023.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import islice

from torch import Tensor

KeyChain = list[bytes]  # the key of the namespace, then one key per full block; empty: the row shares nothing
StateCopy = list[list[Tensor]]


class BlockPool:
    def __init__(self, count: int, block: int, rows: int, states: int):
        """count: blocks beside block 0. block: tokens per block. states: how many copies of states are kept."""
        self.count, self.block, self.max_states = count, block, states
        self.free = list(range(count, 0, -1))  # taken from the end; block 0 belongs to no row
        self.owned: list[list[int]] = [[] for _ in range(rows)]
        self.owner_counts = [0] * (count + 1)  # rows that own each block: several rows share a prefix
        self.chains: list[KeyChain] = [[] for _ in range(rows)]
        self.by_key: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()  # blocks with a key but no owner, least recently used first
        self.states: OrderedDict[bytes, StateCopy] = OrderedDict()  # least recently used first
        self.evictions = 0

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def own(self, row: int, blocks: Sequence[int]) -> None:
        """Append these blocks to those of a row."""
        self.owned[row] += blocks
        for block in blocks:
            self.owner_counts[block] += 1

    def release(self, row: int, keep: int) -> list[int]:
        """Remove all but the first `keep` blocks from a row; returns those that are free now."""
        removed, free = self.owned[row][keep:], []
        del self.owned[row][keep:], self.chains[row][keep + 1 :]
        for block in reversed(removed):  # a prefix is evicted from its end
            self.owner_counts[block] -= 1
            if not self.owner_counts[block]:
                if block in self.keys:
                    self.cached[block] = None
                else:
                    free.append(block)
        self.free += free
        return free

    def lookup(self, namespace: object, tokens: Sequence[int | bytes], needs_state: bool) -> KeyChain:
        """The keys of the longest cached prefix. At least the last token is left over: its logits are needed."""
        chain = [sha256(repr(namespace).encode()).digest()]
        usable = 1
        for start in range(0, len(tokens) - self.block, self.block):
            key = next_key(chain[-1], tokens[start : start + self.block])
            if key not in self.by_key:
                break
            chain.append(key)
            if not needs_state or key in self.states:
                usable = len(chain)
        return chain[:usable]

    def share(self, row: int, chain: KeyChain) -> None:
        """Give the blocks of these keys to an empty row."""
        blocks = [self.by_key[key] for key in chain[1:]]
        for block in blocks:
            self.cached.pop(block, None)
        self.own(row, blocks)
        self.chains[row] = chain
        if chain[-1] in self.states:
            self.states.move_to_end(chain[-1])

    def commit(self, row: int, tokens: Sequence[int | bytes], length: int) -> None:
        """Give keys to the row's full blocks among its first `length` tokens, whose contents are computed."""
        chain = self.chains[row]
        while 0 < len(chain) <= length // self.block:
            index = len(chain) - 1
            key = next_key(chain[-1], tokens[index * self.block : len(chain) * self.block])
            chain.append(key)
            if key not in self.by_key:  # otherwise another row has computed the same block
                block = self.owned[row][index]
                self.by_key[key], self.keys[block] = block, key

    def keep_state(self, key: bytes, arrays: StateCopy) -> None:
        """Keep a copy of the states after the block of this key."""
        self.states[key] = arrays
        self.states.move_to_end(key)
        while len(self.states) > self.max_states:
            self.states.popitem(last=False)

    def evict(self, count: int) -> list[int]:
        """Free up to this many cached blocks, the least recently used first, and return them."""
        evicted = list(islice(self.cached, count))
        self.evictions += len(evicted)
        return self.forget(evicted)

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Remove the keys of these blocks; returns those that are free now."""
        free = []
        for block in blocks:
            if (key := self.keys.pop(block, None)) is not None:
                del self.by_key[key]
                self.states.pop(key, None)
            if block in self.cached:
                del self.cached[block]
                free.append(block)
        self.free += free
        return free

    def forget_row(self, row: int) -> list[int]:
        """Remove all keys of a row's prefix and give it no new ones; returns the blocks that are free now."""
        blocks = [self.by_key[key] for key in self.chains[row][1:] if key in self.by_key]
        self.chains[row] = []
        return self.forget(blocks)

    def check(self) -> None:
        """Raise AssertionError if a block is lost, in two places at once, or has a wrong count or key."""
        owned = {block for blocks in self.owned for block in blocks}
        places = [*self.free, *self.cached, *owned]
        assert sorted(places) == list(range(1, self.count + 1)), "every block is free, cached or owned, and only one"
        for row, blocks in enumerate(self.owned):
            assert len(set(blocks)) == len(blocks), f"row {row} owns a block twice"
            assert len(self.chains[row]) <= len(blocks) + 1, f"row {row} has more keys than blocks"
        counts = [0] * (self.count + 1)
        for block in (block for blocks in self.owned for block in blocks):
            counts[block] += 1
        assert counts == self.owner_counts, "the counts of owners are those of the rows"
        assert {block: key for key, block in self.by_key.items()} == self.keys, "keys and blocks belong together"
        assert set(self.cached) <= set(self.keys) and not set(self.free) & set(self.keys), (
            "cached: with a key; free: none"
        )
        assert set(self.states) <= set(self.by_key) and len(self.states) <= self.max_states, "states belong to blocks"


def next_key(previous: bytes, tokens: Sequence[int | bytes]) -> bytes:
    """tokens: ids, or digests of their embeddings."""
    ids = [token for token in tokens if isinstance(token, int)]
    if len(ids) < len(tokens):
        return sha256(previous + repr(list(tokens)).encode()).digest()
    return sha256(previous + array("q", ids).tobytes()).digest()
