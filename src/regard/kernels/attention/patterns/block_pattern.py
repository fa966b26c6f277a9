"""Block-sparse attention: dense within blocks, with a table of the key blocks of each query block.

    row r of the table lists the key blocks of query block r = ⌊i/b⌋          causal: and j <= i

A query block after the last row attends to itself. Child et al. 2019 computed their patterns this way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout
from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class BlockSparse(Mask):
    block: int
    layout: tuple[tuple[int, ...], ...]
    causal: bool = True

    def check(self) -> None:
        require(self.block > 0, f"block_sparse: block={self.block} must be positive")
        require(len(self.layout) > 0, "block_sparse: layout is empty; list the key blocks of each query block")
        for row, blocks in enumerate(self.layout):
            require(
                all(b >= 0 for b in blocks) and len(set(blocks)) == len(blocks),
                f"block_sparse: row {row} of the layout is {list(blocks)}; list each block once, from 0",
            )

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        row, column, rows = q // self.block, k // self.block, len(self.layout)
        listed = [b for blocks in self.layout for b in blocks]
        columns = max([0, *listed]) + 1  # torch 2.11 cannot compile max(listed, default=0)
        # The last row and column are for all blocks beyond the listed ones.
        table = torch.zeros(rows + 1, columns + 1, dtype=torch.bool, device=q.device)
        for r, blocks in enumerate(self.layout):
            table[r, list(blocks)] = True
        allowed = table[row.clamp_max(rows), column.clamp_max(columns)] | ((row >= rows) & (row == column))
        return allowed & (k <= q) if self.causal else allowed

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        count = -(-length // self.block)
        links = tuple(
            tuple(b for b in blocks if b != row and b < count) for row, blocks in enumerate(self.layout[:count])
        )
        return (BlockLayout(self.block, links=links),)
