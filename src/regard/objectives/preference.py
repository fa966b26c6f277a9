"""Train on preference pairs directly, without a reward model.

    DPO     r = β (log π(y | x) - log π_ref(y | x))      loss = -log σ(r_chosen - r_rejected)      Rafailov et al. 2023
    SimPO   r = β log π(y | x) / |y|                     loss = -log σ(r_chosen - r_rejected - γ)  Meng et al. 2024
    ORPO    odds(y) = p / (1 - p), log p = log π(y | x) / |y|                                      Hong et al. 2024
            loss = -log p_chosen - λ log σ(log odds(chosen) - log odds(rejected))

At the start of DPO both rewards are 0, and the loss is log 2. The rewards that a model implies are measured with every
step: `accuracy` is the share of pairs whose chosen sequence has the larger one.

DPO only compares: both likelihoods may fall, and the probability moves to completions that are in no pair. If the model
hardly ever writes the chosen completions, `likelihood` adds α times -log π(y_chosen | x) / |y_chosen| to the loss (RPO,
Pang et al. 2024).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.objectives.base import LossResult, add_losses
from regard.objectives.preference_pairs import PreferencePairs, pair_count, pair_metrics
from regard.objectives.sequence_logprobs import sequence_logprobs
from regard.spec import require


@dataclass(frozen=True)
class DPO(PreferencePairs):
    """With Δ = r_chosen - r_rejected, the losses are

    sigmoid   -(1 - ε) log σ(Δ) - ε log σ(-Δ)                    ε: label_smoothing (Mitchell 2023)
    robust    [-(1 - ε) log σ(Δ) + ε log σ(-Δ)] / (1 - 2 ε)      unbiased if a share ε of the labels is wrong
    hinge     max(0, 1 - Δ)                                      (Zhao et al. 2023)
    ipo       (Δ/β - 1 / (2 β))², with log-probabilities per token (Azar et al. 2023)
    """

    beta: float = 0.1  # the larger, the closer the model stays to the reference
    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0  # share of pairs whose label is assumed to be wrong
    reference_free: bool = False  # log π_ref = 0
    length_normalized: bool = False  # log-probabilities per token; always with ipo
    likelihood: float = 0.0  # weight of the chosen sequence's -log π per token

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def check(self) -> None:
        require(self.beta > 0, f"{self.kind}: beta={self.beta} must be positive")
        require(
            0 <= self.label_smoothing < 0.5,
            f"{self.kind}: label_smoothing={self.label_smoothing} must be in [0, 0.5): the share of wrong labels",
        )
        require(self.likelihood >= 0, f"{self.kind}: likelihood={self.likelihood} must not be negative")
        require(
            self.label_smoothing == 0 or self.loss in ("sigmoid", "robust"),
            f"{self.kind}: loss={self.loss!r} has no label_smoothing; use loss='sigmoid' or 'robust'",
        )

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs the fields of a packed batch, and `reference` (B, 2)."""
        logprobs, lengths, losses = sequence_logprobs(model, batch, 2)  # (B, 2)
        ratios = logprobs if self.reference_free else logprobs - batch.reference.to(logprobs.dtype)
        if self.length_normalized or self.loss == "ipo":
            ratios = ratios / lengths.clamp_min(1)
        rewards = self.beta * ratios
        loss = self.pair_losses(rewards[:, 0] - rewards[:, 1]).sum()
        metrics = pair_metrics(rewards)
        if self.likelihood:
            likelihood = -(logprobs / lengths.clamp_min(1))[:, 0].sum()
            loss = loss + self.likelihood * likelihood
            metrics["likelihood"] = likelihood.detach()
        return add_losses(loss, pair_count(rewards), losses, metrics)

    def pair_losses(self, delta: Tensor) -> Tensor:
        smoothing = self.label_smoothing
        match self.loss:
            case "sigmoid":
                return -(1 - smoothing) * F.logsigmoid(delta) - smoothing * F.logsigmoid(-delta)
            case "robust":
                loss = -(1 - smoothing) * F.logsigmoid(delta) + smoothing * F.logsigmoid(-delta)
                return loss / (1 - 2 * smoothing)
            case "hinge":
                return F.relu(1 - delta)
            case "ipo":
                return (delta / self.beta - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class SimPO(PreferencePairs):
    beta: float = 2.0
    margin: float = 1.0  # γ, by which the reward of the chosen sequence should be larger

    def check(self) -> None:
        require(self.beta > 0, f"{self.kind}: beta={self.beta} must be positive")
        require(self.margin >= 0, f"{self.kind}: margin={self.margin} must not be negative")

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        logprobs, lengths, losses = sequence_logprobs(model, batch, 2)  # (B, 2)
        rewards = self.beta * logprobs / lengths.clamp_min(1)
        loss = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.margin).sum()
        return add_losses(loss, pair_count(rewards), losses, pair_metrics(rewards))


@dataclass(frozen=True)
class ORPO(PreferencePairs):
    weight: float = 0.1  # λ, of the odds ratio beside the likelihood of the chosen sequence

    SMALLEST: ClassVar[float] = 1e-6  # of 1 - p, which is rounded to 0 if every token is certain

    def check(self) -> None:
        require(self.weight >= 0, f"{self.kind}: weight={self.weight} must not be negative")

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        sums, lengths, losses = sequence_logprobs(model, batch, 2)  # (B, 2)
        logprobs = sums / lengths.clamp_min(1)
        log_odds = logprobs - torch.log(-torch.expm1(logprobs.clamp_max(-self.SMALLEST)))
        likelihood = -logprobs[:, 0]
        ratio = -F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
        loss = (likelihood + self.weight * ratio).sum()
        metrics = {"likelihood": likelihood.detach().sum(), **pair_metrics(self.weight * logprobs)}
        return add_losses(loss, pair_count(logprobs), losses, metrics)
