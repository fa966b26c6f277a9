"""Logits that are not yet made: the last vectors, and the table that turns them into one score a word.

    logits = cap(scale · (W h + b))          (…, V)

Generation wants them for one token; a loss wants all tokens', but only for a moment, and reads them chunk by chunk
(kernels/linear_cross_entropy.py).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.linear_cross_entropy import linear_cross_entropy


class Unembedded(NamedTuple):
    hidden: Tensor  # (…, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None
    scale: float
    softcap: float | None

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def logits(self) -> Tensor:
        return finished(F.linear(self.hidden, self.weight, self.bias), self.scale, self.softcap)  # (…, V)

    def cross_entropy(self, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and weights (…): Σ w · -log p(target), and Σ w where the target is the likeliest."""
        return linear_cross_entropy(
            self.hidden.flatten(0, -2), self.weight, targets.flatten(), weights.flatten(),
            self.bias, self.scale, self.softcap,
        )  # fmt: skip


def finished(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = logits if scale == 1.0 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
