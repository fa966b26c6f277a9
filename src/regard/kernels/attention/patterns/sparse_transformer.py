"""The Sparse Transformer's two patterns: with a stride near √n, every pair of tokens is two hops apart in O(n√n) work.

    Strided(l):     i - j < l   or   (i - j) mod l = 0                     images, music: what repeats with a period
    Fixed(l, c):    ⌊i/l⌋ = ⌊j/l⌋   or   j mod l >= l - c                  text: the last c of each block sum it up

both for j <= i. Here one head sees both halves; layers that take turns are Window(l) and Dilated(n, l).
Child et al. 2019.
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout, block_for
from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class StridedPattern(Mask):
    causal = True
    relative = True

    stride: int

    def check(self) -> None:
        require(self.stride > 1, f"strided: stride={self.stride} must be at least 2; 1 sees everything")

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k < self.stride) | ((q - k) % self.stride == 0))

    def folds(self, length: int) -> tuple[BlockLayout, ...]:
        near = BlockLayout(block_for(self.stride), before=self.stride - 1)
        return near, BlockLayout(-(-length // self.stride), step=self.stride)


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
        same = q // self.block == k // self.block
        return (k <= q) & (same | (k % self.block >= self.block - self.summary))

    def folds(self, length: int) -> tuple[BlockLayout, ...]:
        columns = tuple(j for j in range(length) if j % self.block >= self.block - self.summary)
        return (BlockLayout(self.block, shared=columns),)
