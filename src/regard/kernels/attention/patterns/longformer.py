"""Longformer: a sliding window, and a few global tokens that attend to all tokens and that all tokens attend to.

    |i - j| <= w   or   i < g   or   j < g          causal: and j <= i

The global tokens are the first g of a document ([CLS], a question). The window has w tokens on each side of the query.
Beltagy et al. 2020 (whose attention window counts both sides: 2w).
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout, block_size
from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class Longformer(Mask):
    window: int  # tokens on each side
    globals: int = 1
    causal: bool = False

    def check(self) -> None:
        require(self.window > 0, f"longformer: window={self.window} must be positive")
        require(self.globals > 0, f"longformer: globals={self.globals} must be positive; use window for none")

    @property
    def sliding_window(self) -> int | None:
        return self.window + 1 if self.causal else None

    @property
    def first_tokens(self) -> int:
        return self.globals

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        allowed = ((q - k).abs() <= self.window) | (q < self.globals) | (k < self.globals)
        return allowed & (k <= q) if self.causal else allowed

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        global_tokens = min(self.globals, length)
        after = 0 if self.causal else self.window
        return (
            BlockLayout(
                block_size(self.window + after),
                self.window,
                after,
                global_keys=tuple(range(global_tokens)),
                dense_queries=0 if self.causal else global_tokens,  # causal: all keys of a global query are global keys
            ),
        )
