"""Training of draft heads and draft layers for speculative decoding, on the hidden states of a frozen decoder.

    Medusa    Σ_k λ^k · -log p_k(t_{i+1+k})                      head k: the token k positions after the next
    EAGLE     SmoothL1(f̂_{i+1}, f_{i+1}) + w · CE(p(· | f_{i+1}), p(· | f̂_{i+1}))

t are the tokens of the data, f the decoder's hidden states, f̂ those that the layer predicts, and p the distribution
under the decoder's own head. Noise on the features that the layer reads prepares it for its own errors, which it reads
after the first token of a draft. Cai et al. 2024 (λ = 0.8), Li et al. 2024 (w = 0.1, noise within ±0.1).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.models.decoder import DecoderModule
from regard.models.eagle import EagleLayerModule
from regard.models.medusa import MedusaHeadsModule
from regard.objectives.base import LossResult, cross_entropy, layout_of, shifted


@dataclass(frozen=True)
class MedusaLoss:
    """Metrics: the share of tokens that each head predicts, `accuracy_1` for the token after the next."""

    target: DecoderModule
    decay: float = 0.8
    scope: ClassVar[Literal["token", "batch"]] = "token"

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        assert isinstance(model, MedusaHeadsModule)
        with torch.no_grad():
            hidden = self.target.hidden(batch.tokens, layout_of(batch))  # (B, L, D)
        weights = wide_weights(batch, hidden)
        metrics: dict[str, Tensor] = {}
        loss, count = hidden.new_zeros(()), weights.sum()
        for k, logits in enumerate(model(hidden, self.target), start=1):
            targets, own_weights = shifted(batch, weights, k)
            own_loss, correct = cross_entropy(logits, targets, own_weights)
            loss = loss + self.decay**k * own_loss
            # shares of the tokens that have a token so far ahead, times the count that they are divided by later
            metrics[f"accuracy_{k}"] = correct.detach() / own_weights.sum().clamp_min(1) * count
        return loss, count, metrics


@dataclass(frozen=True)
class EagleLoss:
    """Metrics: the share of tokens that the layer and the decoder both find most likely, and both parts of the loss."""

    target: DecoderModule
    weight: float = 0.1  # of the cross-entropy
    noise: float = 0.1
    scope: ClassVar[Literal["token", "batch"]] = "token"

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        assert isinstance(model, EagleLayerModule)
        layout = layout_of(batch)
        with torch.no_grad():
            hidden = self.target.hidden(batch.tokens, layout)  # (B, L, D)
            # the targets of padding may be no ids
            embeddings = self.target.embed(batch.targets.clamp(0, self.target.spec.vocab - 1))
        features = hidden + (torch.rand_like(hidden) * 2 - 1) * self.noise if model.training else hidden
        _, weights = shifted(batch, wide_weights(batch, hidden), 1)
        chosen = weights > 0
        weights = weights[chosen]  # (N,)
        predicted = model(features, embeddings, layout)[chosen]  # (N, D)
        expected = hidden.roll(-1, 1)[chosen]
        regression = (
            F.smooth_l1_loss(predicted.to(weights.dtype), expected, reduction="none").mean(-1) * weights
        ).sum()
        with torch.no_grad():
            p = self.target.logits(expected).to(weights.dtype).softmax(-1)  # (N, V)
        log_q = self.target.logits(predicted).to(weights.dtype).log_softmax(-1)
        entropy = (-(p * log_q).sum(-1) * weights).sum()
        agrees = ((p.argmax(-1) == log_q.argmax(-1)) * weights).sum()
        metrics = {"accuracy": agrees, "regression": regression.detach(), "cross_entropy": entropy.detach()}
        return regression + self.weight * entropy, weights.sum(), metrics


def wide_weights(batch: Batch, like: Tensor) -> Tensor:
    return batch.weights.to(torch.promote_types(like.dtype, torch.float32))
