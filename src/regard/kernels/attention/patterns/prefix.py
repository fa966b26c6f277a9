"""Prefix-LM: the prompt is read in both directions, what follows is written from left to right.

    j <= i   or   j < p

Liu et al. 2018; Raffel et al. 2020. A token of the prefix sees later ones, so a decoder, whose tokens are remembered as
they come, cannot have it: the prefix must be given whole.
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.mask import Mask
from regard.spec import require


@dataclass(frozen=True)
class PrefixLM(Mask):
    causal = False

    prefix: int

    def check(self) -> None:
        require(self.prefix > 0, f"prefix_lm: prefix={self.prefix} must be positive; without one it is causal")

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < self.prefix)
