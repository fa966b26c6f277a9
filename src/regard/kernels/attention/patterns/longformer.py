"""Longformer: a window for all, and a few global tokens that see all and are seen by all.

    |i - j| <= w   or   i < g   or   j < g          causal: and j <= i

The global tokens are the first g of a text ([CLS], a question). The window is w tokens on each side, beside the token
itself. Beltagy et al. 2020 (who count both sides: their attention window is 2w).
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout, block_for
from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class Longformer(Mask):
    window: int  # on each side
    globals: int = 1
    causal: bool = False

    def check(self) -> None:
        require(self.window > 0, f"longformer: window={self.window} must be positive")
        require(self.globals > 0, f"longformer: globals={self.globals} must be positive; without any it is a window")

    @property
    def near(self) -> int | None:
        return self.window + 1 if self.causal else None

    @property
    def first(self) -> int:
        return self.globals

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        seen = ((q - k).abs() <= self.window) | (q < self.globals) | (k < self.globals)
        return seen & (k <= q) if self.causal else seen

    def folds(self, length: int) -> tuple[BlockLayout, ...]:
        first = min(self.globals, length)
        after = 0 if self.causal else self.window
        return (
            BlockLayout(
                block_for(self.window + after),
                self.window,
                after,
                shared=tuple(range(first)),
                whole=0 if self.causal else first,  # a causal global token sees only what every block has at hand
            ),
        )
