"""BigBird: a query block attends to its neighbours, to the first blocks, and to a few random ones.

    key block c of query block r:   |r - c| <= ⌊w/2⌋   or   r < g   or   c < g   or   c drawn for r     causal: j <= i

Random links connect any two tokens in a few hops. Zaheer et al. 2020. A link is drawn by a hash of (seed, r, index of
the link), so positions alone determine it: the blocks that r does not attend to otherwise are divided into equal
shares, and the n-th link is drawn from the n-th share, so all links of a block differ. Candidates are the blocks of a
sequence of `length` tokens, or with a causal mask the blocks before r.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout
from regard.kernels.attention.mask import Mask
from regard.spec import require

UINT32_MAX = 0xFFFFFFFF


@dataclass(frozen=True)
class BigBird(Mask):
    block: int
    window: int = 3  # blocks, centred on the query's own
    globals: int = 2  # blocks
    random: int = 3  # blocks
    length: int = 4096
    seed: int = 0
    causal: bool = False

    def check(self) -> None:
        for name in ("block", "globals", "random", "length"):
            require(getattr(self, name) > 0, f"bigbird: {name}={getattr(self, name)} must be positive")
        require(self.window > 0 and self.window % 2 == 1, f"bigbird: window={self.window} must be odd: 1, 3, 5 …")

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        row, column = q // self.block, k // self.block
        allowed = ((row - column).abs() <= self.window // 2) | (row < self.globals) | (column < self.globals)
        for n in range(self.random):
            allowed = allowed | (self.link(row, n) == column)
        return allowed & (k <= q) if self.causal else allowed

    def link(self, row: Tensor, n: int) -> Tensor:
        """The n-th random key block of each query block; -1 where its share has no candidates."""
        low, high = row - self.window // 2, row + self.window // 2 + 1  # the window
        end = low if self.causal else torch.full_like(row, -(-self.length // self.block))
        skipped = (torch.minimum(high, end) - low.clamp_min(self.globals)).clamp_min(0)
        candidates = (end - self.globals - skipped).clamp_min(0)
        start, stop = candidates * n // self.random, candidates * (n + 1) // self.random
        drawn = self.globals + start + random_hash(self.seed, row, n) % (stop - start).clamp_min(1)
        drawn = torch.where(drawn >= low.clamp_min(self.globals), drawn + skipped, drawn)
        return torch.where(stop > start, drawn, -1)

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        count = -(-length // self.block)
        rows = torch.arange(count)
        drawn = torch.stack([self.link(rows, n) for n in range(self.random)], -1).tolist()
        neighbours = self.window // 2 * self.block
        global_tokens = min(self.globals * self.block, length)
        return (
            BlockLayout(
                self.block,
                neighbours,
                0 if self.causal else neighbours,
                global_keys=tuple(range(global_tokens)),
                links=tuple(tuple(c for c in row if 0 <= c < count) for row in drawn),
                dense_queries=0 if self.causal else global_tokens,
            ),
        )


def random_hash(seed: int, row: Tensor, n: int) -> Tensor:
    """A pseudo-random number below 2³² for each row: a multiply-and-shift hash of all arguments."""
    x = (row.long() * 0x9E3779B1 + (n * 0x85EBCA77 + seed * 0xC2B2AE3D) % 2**32) & UINT32_MAX
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & UINT32_MAX
    x = ((x ^ (x >> 15)) * 0x846CA68B) & UINT32_MAX
    return x ^ (x >> 16)
