"""The outputs of a model that a training objective needs.

Logits may be lazy: the hidden states and the head's weight, before the matrix product

    logits = cap(scale · (W h + b))          (…, V)

Generation needs the logits of one token. A loss needs the logits of all tokens, but never all at once: it computes them
chunk by chunk (kernels/linear_cross_entropy.py).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.linear_cross_entropy import linear_cross_entropy
from regard.kernels.linear_logprobs import linear_logprobs, logprobs_of, scale_and_cap
from regard.parts.block import Losses


class LazyLogits(NamedTuple):
    hidden: Tensor  # (…, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def materialize(self) -> Tensor:
        return scale_and_cap(F.linear(self.hidden, self.weight, self.bias), self.scale, self.softcap)  # (…, V)

    def select(self, chosen: Tensor) -> "LazyLogits":
        """Those of the chosen tokens (…), as (tokens, V)."""
        return self._replace(hidden=self.hidden[chosen])

    def cross_entropy(
        self, targets: Tensor, weights: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Targets and weights (…) -> Σ w · -log p(target), and Σ w over tokens whose target has the largest logit."""
        return linear_cross_entropy(
            self.hidden.flatten(0, -2), self.weight, targets.flatten(), weights.flatten(),
            self.bias, self.scale, self.softcap, label_smoothing=label_smoothing, z_loss=z_loss,
        )  # fmt: skip

    def divide(self, temperature: float) -> "LazyLogits":
        softcap = None if self.softcap is None else self.softcap / temperature
        return self._replace(scale=self.scale / temperature, softcap=softcap)

    def logprobs(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets (…) -> log p(target), and the entropies, which have no gradient."""
        values, entropies = linear_logprobs(
            self.hidden.flatten(0, -2), self.weight, targets.flatten(), self.bias, self.scale, self.softcap
        )
        return values.view(targets.shape), entropies.view(targets.shape)


class Outputs(NamedTuple):
    logits: Tensor | LazyLogits  # (B, L, V)
    ahead_logits: tuple[Tensor | LazyLogits, ...]  # of the multi-token prediction (`ahead`) blocks, (B, L, V) each
    losses: Losses  # auxiliary losses of the bodies, in training
    pair_logits: Tensor | None = None  # (B, labels) of a PreTraining head
    values: Tensor | None = None  # (B, L) of a value head


def materialize(logits: Tensor | LazyLogits) -> Tensor:
    return logits.materialize() if isinstance(logits, LazyLogits) else logits


def token_logprobs(logits: Tensor | LazyLogits, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log p(target) of every token (…), and the entropies of the predictions, which have no gradient; p is
    softmax(logits / temperature)."""
    if temperature != 1.0:
        logits = logits.divide(temperature) if isinstance(logits, LazyLogits) else logits / temperature
    return logits.logprobs(targets) if isinstance(logits, LazyLogits) else logprobs_of(logits, targets)
