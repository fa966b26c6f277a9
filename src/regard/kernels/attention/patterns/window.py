"""Sliding windows: a query attends to nearby keys only, adjacent or dilated.

    Window(w):                  0 <= i - j < w                   w keys, the query's own token included
    Window(w, causal=False):    |i - j| <= w                     2w + 1 keys
    Dilated(w, s):              i - j in {0, s, 2s, … (w-1)s}    w keys; not causal: |i - j| in {0, s, … ws}
    SinksAndWindow(s, w):       0 <= i - j < w  or  j < s        for j <= i

A stack of n causal windows of w reaches n(w-1) tokens back. Beltagy et al. 2020; Jiang et al. 2023. A dilated window
over the whole length is the second term of StridedPattern (sparse_transformer.py). Many models put much weight on
the first tokens whatever their content, and a window without them fails on long streams. Xiao et al. 2023
(StreamingLLM).
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout, block_size
from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class Window(Mask):
    relative = True

    size: int
    causal: bool = True

    def check(self) -> None:
        require(self.size > 0, f"window: size={self.size} must be positive; a causal window of 1 is the token itself")

    @property
    def sliding_window(self) -> int | None:
        return self.size if self.causal else None

    @property
    def max_keys(self) -> int:
        return self.size if self.causal else 2 * self.size + 1

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        if self.causal:
            return (k <= q) & (q - k < self.size)
        return (q - k).abs() <= self.size

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        before = min(self.size - 1 if self.causal else self.size, length)
        after = 0 if self.causal else before
        return (BlockLayout(block_size(before + after), before, after),)


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
    def sliding_window(self) -> int | None:
        return (self.size - 1) * self.step + 1 if self.causal else None

    @property
    def max_keys(self) -> int:
        return self.size if self.causal else 2 * self.size + 1

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k if self.causal else (q - k).abs()
        near = distance < self.size * self.step if self.causal else distance <= self.size * self.step
        return (distance >= 0) & near & (distance % self.step == 0)

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        group = -(-length // self.step)
        if self.size >= group:
            return (BlockLayout(group, stride=self.step),)
        before = self.size - 1 if self.causal else self.size
        after = 0 if self.causal else before
        return (BlockLayout(block_size(before + after), before, after, stride=self.step),)


@dataclass(frozen=True)
class SinksAndWindow(Mask):
    """A window and the first tokens. `Attention.sinks` is unrelated: a learned score per head, without a token."""

    causal = True

    sinks: int  # number of first tokens that every query attends to
    size: int  # of the window, the query's own token included

    def check(self) -> None:
        require(self.sinks > 0, f"sinks_and_window: sinks={self.sinks} must be positive; use window for no sinks")
        require(self.size > 0, f"sinks_and_window: size={self.size} must be positive")

    @property
    def sliding_window(self) -> int:
        return self.size

    @property
    def first_tokens(self) -> int:
        return self.sinks

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k < self.size) | (k < self.sinks))

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        sinks = tuple(range(min(self.sinks, length)))
        return (BlockLayout(block_size(self.size), before=self.size - 1, global_keys=sinks),)
