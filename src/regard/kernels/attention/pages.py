"""Keys or values that lie in the pages of a pool: what a paged store hands to attention instead of a copy of them.

    token t of row b lies in slot table[b, t // block] · block + t mod block

`decode` reads them where they lie; for every other backend they are gathered first. Kwon et al. 2023, PagedAttention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pages:
    pool: Tensor  # (slots, heads, dim), of everyone
    table: Tensor  # (B, n) the blocks of each row, in order
    block: int  # slots in a block

    def gather(self) -> Tensor:
        blocks = self.pool.unflatten(0, (-1, self.block))[self.table]  # (B, n, block, heads, dim)
        return blocks.flatten(1, 2).transpose(1, 2)  # (B, heads, S, dim)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of what `gather` would give."""
        rows, blocks = self.table.shape
        return rows, self.pool.shape[1], blocks * self.block, self.pool.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype


def gathered(x: Tensor | Pages) -> Tensor:
    return x.gather() if isinstance(x, Pages) else x
