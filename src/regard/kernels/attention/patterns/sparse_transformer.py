"""The two patterns of the Sparse Transformer: with a stride near √n all tokens are connected in two hops, in O(n√n).

    Strided(l):     i - j < l   or   (i - j) mod l = 0                     for data with a period: images, music
    Fixed(l, c):    ⌊i/l⌋ = ⌊j/l⌋   or   j mod l >= l - c                  for text: the last c tokens summarize a block

both for j <= i. Here every head has both terms of its pattern. To alternate the terms of Strided(l) by layer, use
Window(l) and Dilated(n, l). Child et al. 2019.
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout, block_size
from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class StridedPattern(Mask):
    causal = True
    relative = True

    stride: int

    def check(self) -> None:
        require(self.stride > 1, f"strided: stride={self.stride} must be at least 2; a stride of 1 is causal")

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k < self.stride) | ((q - k) % self.stride == 0))

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        near = BlockLayout(block_size(self.stride), before=self.stride - 1)
        return near, BlockLayout(-(-length // self.stride), stride=self.stride)


@dataclass(frozen=True)
class FixedPattern(Mask):
    causal = True

    block: int
    summary: int = 1

    def check(self) -> None:
        require(
            0 < self.summary < self.block,
            f"fixed: summary={self.summary} must be positive and smaller than block={self.block}",
        )

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        same_block = q // self.block == k // self.block
        return (k <= q) & (same_block | (k % self.block >= self.block - self.summary))

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        summary_keys = tuple(j for j in range(length) if j % self.block >= self.block - self.summary)
        return (BlockLayout(self.block, global_keys=summary_keys),)
