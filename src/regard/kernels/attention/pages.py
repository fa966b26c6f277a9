"""Keys or values in the pages of a pool, which a paged store passes to attention without copying them.

    token t of row b is in slot table[b, t // block] · block + t mod block

`decode` reads the pages in place; for every other backend they are gathered first. Kwon et al. 2023, PagedAttention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pages:
    pool: Tensor  # (slots, heads, dim) of all rows
    table: Tensor  # (B, n) the blocks of each row, in order
    block: int  # slots per block

    def gather(self) -> Tensor:
        blocks = self.pool.unflatten(0, (-1, self.block))[self.table]  # (B, n, block, heads, dim)
        return blocks.flatten(1, 2).transpose(1, 2)  # (B, heads, S, dim)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of `gather()`."""
        rows, blocks = self.table.shape
        return rows, self.pool.shape[1], blocks * self.block, self.pool.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype


def gather_pages(x: Tensor | Pages) -> Tensor:
    return x.gather() if isinstance(x, Pages) else x
