"""Windows: a token sees its neighbours only, side by side or with steps between them.

    Window(w):              0 <= i - j < w                       w keys, the token itself among them
    Window(w, causal=False):    |i - j| <= w                     2w + 1 keys: w on each side, and itself
    Dilated(w, s):          i - j in {0, s, 2s, … (w-1)s}        w keys; both sides: |i - j| in {0, s, … ws}

Layers of windows add up: n causal layers of w reach n(w-1) tokens back. Beltagy et al. 2020; Jiang et al. 2023.
Dilated over the whole length, it is the far half of the Sparse Transformer (sparse_transformer.py).
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout, block_for
from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class Window(Mask):
    relative = True

    size: int
    causal: bool = True

    def check(self) -> None:
        require(self.size > 0, f"window: size={self.size} must be positive; a causal window of 1 sees the token itself")

    @property
    def near(self) -> int | None:
        return self.size if self.causal else None

    @property
    def max_keys(self) -> int:
        return self.size if self.causal else 2 * self.size + 1

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        if self.causal:
            return (k <= q) & (q - k < self.size)
        return (q - k).abs() <= self.size

    def folds(self, length: int) -> tuple[BlockLayout, ...]:
        before = min(self.size - 1 if self.causal else self.size, length)
        after = 0 if self.causal else before
        return (BlockLayout(block_for(before + after), before, after),)


@dataclass(frozen=True)
class Dilated(Mask):
    relative = True

    size: int
    step: int
    causal: bool = True

    def check(self) -> None:
        require(self.size > 0, f"dilated: size={self.size} must be positive")
        require(self.step > 0, f"dilated: step={self.step} must be positive")

    @property
    def near(self) -> int | None:
        return (self.size - 1) * self.step + 1 if self.causal else None

    @property
    def max_keys(self) -> int:
        return self.size if self.causal else 2 * self.size + 1

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        ahead = q - k if self.causal else (q - k).abs()
        near = ahead < self.size * self.step if self.causal else ahead <= self.size * self.step
        return (ahead >= 0) & near & (ahead % self.step == 0)

    def folds(self, length: int) -> tuple[BlockLayout, ...]:
        gathered = -(-length // self.step)
        if self.size >= gathered:
            return (BlockLayout(gathered, step=self.step),)
        before = self.size - 1 if self.causal else self.size
        after = 0 if self.causal else before
        return (BlockLayout(block_for(before + after), before, after, step=self.step),)
