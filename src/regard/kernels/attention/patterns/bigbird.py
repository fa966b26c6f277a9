"""BigBird: blocks that see their neighbours, the first blocks, and a few others drawn at random.

    row r sees the blocks   |r - c| <= ⌊w/2⌋   or   r < g   or   c < g   or   c drawn for r          causal: and j <= i

Random links make a small world: any two tokens are a few hops apart. Zaheer et al. 2020. A link is drawn from the hash
of (seed, row, number of the link): of the blocks that the row does not see anyhow, the n-th link takes one of the n-th
equal share, so links differ, and positions alone decide them. Both ways, the blocks are those of a text of `length`
tokens; causal, those before the row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout
from regard.kernels.attention.mask import Mask
from regard.spec import require

WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class BigBird(Mask):
    block: int
    window: int = 3  # blocks, the row's own in their middle
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
        seen = ((row - column).abs() <= self.window // 2) | (row < self.globals) | (column < self.globals)
        for n in range(self.random):
            seen = seen | (self.link(row, n) == column)
        return seen & (k <= q) if self.causal else seen

    def link(self, row: Tensor, n: int) -> Tensor:
        """The block that is the n-th random link of each row; -1 where none is left to be drawn."""
        low, high = row - self.window // 2, row + self.window // 2 + 1  # the window
        end = low if self.causal else torch.full_like(row, -(-self.length // self.block))
        skipped = (torch.minimum(high, end) - low.clamp_min(self.globals)).clamp_min(0)
        free = (end - self.globals - skipped).clamp_min(0)  # blocks that it does not see anyhow
        start, stop = free * n // self.random, free * (n + 1) // self.random
        drawn = self.globals + start + scrambled(self.seed, row, n) % (stop - start).clamp_min(1)
        drawn = torch.where(drawn >= low.clamp_min(self.globals), drawn + skipped, drawn)
        return torch.where(stop > start, drawn, -1)

    def folds(self, length: int) -> tuple[BlockLayout, ...]:
        count = -(-length // self.block)
        rows = torch.arange(count)
        drawn = torch.stack([self.link(rows, n) for n in range(self.random)], -1).tolist()
        reach = self.window // 2 * self.block
        first = min(self.globals * self.block, length)
        return (
            BlockLayout(
                self.block,
                reach,
                0 if self.causal else reach,
                shared=tuple(range(first)),
                links=tuple(tuple(c for c in row if 0 <= c < count) for row in drawn),
                whole=0 if self.causal else first,
            ),
        )


def scrambled(seed: int, row: Tensor, n: int) -> Tensor:
    """A number below 2³² that looks random, the same for the same three: a multiply-and-shift hash."""
    x = (row.long() * 0x9E3779B1 + (n * 0x85EBCA77 + seed * 0xC2B2AE3D) % 2**32) & WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)
