"""A window that keeps the first tokens in sight: what an endless stream needs.

    0 <= i - j < w   or   j < s            for j <= i

Models lean on their first tokens, whatever these say; a window that drops them breaks down. Xiao et al. 2023
(StreamingLLM).
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout, block_for
from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class SinksAndWindow(Mask):
    causal = True

    sinks: int
    size: int  # of the window, the token itself counted

    def check(self) -> None:
        require(self.sinks > 0, f"sinks_and_window: sinks={self.sinks} must be positive; without any it is a window")
        require(self.size > 0, f"sinks_and_window: size={self.size} must be positive")

    @property
    def near(self) -> int:
        return self.size

    @property
    def first(self) -> int:
        return self.sinks

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k < self.size) | (k < self.sinks))

    def folds(self, length: int) -> tuple[BlockLayout, ...]:
        return (BlockLayout(block_for(self.size), before=self.size - 1, shared=tuple(range(min(self.sinks, length)))),)
