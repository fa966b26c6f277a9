"""Sums weighted by exponentials, kept relative to their largest exponent and joined as in online softmax."""

from typing import NamedTuple

import torch
from torch import Tensor

EMPTY = -1e38  # the exponent of nothing: finite, so that differences of two are 0


class Sums(NamedTuple):
    """Of some tokens: Σ e^{k - peak} v and Σ e^{k - peak}, each of one shape."""

    value: Tensor
    weight: Tensor
    peak: Tensor

    def join(self, other: "Sums") -> "Sums":
        peak = torch.maximum(self.peak, other.peak)
        mine, theirs = (self.peak - peak).exp(), (other.peak - peak).exp()
        return Sums(mine * self.value + theirs * other.value, mine * self.weight + theirs * other.weight, peak)

    def fade(self, by: Tensor, kept: Tensor) -> "Sums":
        """What is left after a decay e^by; nothing where it is not kept."""
        return Sums(self.value * kept, self.weight * kept, (self.peak + by).where(kept, EMPTY))

    def tokens(self, some: slice) -> "Sums":
        """Of (B, n, C, F) some of the tokens of each chunk."""
        return Sums(*(x[:, :, some] for x in self))

    def but_first(self, count: int, others: "Sums") -> "Sums":
        """The first tokens of each chunk, and others instead of the rest."""
        return Sums(*(torch.cat([x[:, :, :count], y], 2) for x, y in zip(self, others, strict=True)))
