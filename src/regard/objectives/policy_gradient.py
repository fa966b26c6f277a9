"""Policy gradients: raise the likelihood of completions that are better than expected, lower that of the others.

With o_i the i-th of the G completions of a prompt, R_i its reward, ρ = π / π_old the ratio of its probabilities, and
clip(ρ) = min(max(ρ, 1 - low), 1 + high):

    REINFORCE   loss_i = -A_i log π(o_i)                             A_i = R_i, or R_i - mean R          Williams 1992
    RLOO        loss_i = -min(ρ A_i, clip(ρ) A_i), ρ of o_i          A_i = R_i - mean of the other R_j   Ahmadian 2024
    GRPO        loss_it = -min(ρ A_i, clip(ρ) A_i) + kl · k3, ρ of token t
                                                                     A_i = (R_i - mean R) / (std R + ε)  Shao 2024

The divergence from the reference is estimated by log π - log π_ref per token, which RLOO and REINFORCE subtract from
the reward, or by k3 = π_ref/π - 1 - log π_ref/π ≥ 0 (Schulman 2020), which GRPO adds to the loss. In the first step
after a rollout all ratios are 1, and the gradient of RLOO is that of REINFORCE with its advantages.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.objectives.reinforcement import Reinforcement
from regard.objectives.sequence_logprobs import TokenScores, sum_sequences
from regard.spec import require

EPSILON = 1e-4  # added to standard deviations, as in TRL


@dataclass(frozen=True)
class REINFORCE(Reinforcement):
    kl_in_reward: ClassVar[bool] = True

    group: int = 1
    baseline: Literal["mean", "none"] = "mean"  # subtracted from rewards: their mean over the rollout

    def check(self) -> None:
        super().check()
        require(
            self.epochs == self.updates == 1,
            f"{self.kind}: epochs={self.epochs} and updates={self.updates} must be 1: the loss has no ratio for samples"
            " of an earlier model; use rloo or grpo",
        )

    def advantages(self, rewards: Tensor) -> Tensor:
        if self.baseline == "none":
            return rewards
        require(
            rewards.numel() > 1,
            f"{self.kind}: a single completion equals its mean reward, so its advantage is 0; raise data.rows, or set "
            "baseline='none'",
        )
        return rewards - rewards.mean()

    def sequence_weights(self, lengths: Tensor) -> Tensor:
        return lengths.mean().expand_as(lengths)

    def token_losses(self, scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return -batch.advantages.to(scores.logprobs.dtype) * scores.logprobs, reward_divergence(batch)


@dataclass(frozen=True)
class ClippedPolicy(Reinforcement):
    """Objectives with a clipped ratio."""

    clip: float = 0.2  # low
    clip_high: float | None = None  # None: as `clip`; DAPO has 0.28

    def check(self) -> None:
        super().check()
        require(0 < self.clip < 1, f"{self.kind}: clip={self.clip} must be between 0 and 1")
        require(
            self.clip_high is None or self.clip_high > 0, f"{self.kind}: clip_high={self.clip_high} must be positive"
        )

    def clipped(self, log_ratio: Tensor, batch: Batch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """-min(ρ A, clip(ρ) A) per token, and the weighted number of tokens whose gradient the clipping removes."""
        low, high = 1 - self.clip, 1 + (self.clip if self.clip_high is None else self.clip_high)
        ratio, advantages = log_ratio.exp(), batch.advantages.to(log_ratio.dtype)
        losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        outside = (ratio < low) & (advantages < 0) | (ratio > high) & (advantages > 0)
        return losses, {"clip_fraction": (outside * weights).sum().to(ratio.dtype)}


@dataclass(frozen=True)
class RLOO(ClippedPolicy):
    kl_in_reward: ClassVar[bool] = True

    normalize_advantages: bool = False  # to mean 0 and standard deviation 1 over the rollout

    def check(self) -> None:
        super().check()
        require(self.group > 1, f"{self.kind}: group={self.group} must be at least 2, to compare completions")

    def advantages(self, rewards: Tensor) -> Tensor:
        others = (rewards.sum(1, keepdim=True) - rewards) / (self.group - 1)
        advantages = rewards - others
        if self.normalize_advantages:
            advantages = (advantages - advantages.mean()) / (advantages.std() + EPSILON)
        return advantages

    def sequence_weights(self, lengths: Tensor) -> Tensor:
        return lengths.mean() / lengths

    def token_losses(self, scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = scores.logprobs - batch.old_logprobs.to(scores.logprobs.dtype)
        losses, metrics = self.clipped(sum_sequences(log_ratio, batch.segments), batch, batch.weights)
        return losses, metrics | reward_divergence(batch)


@dataclass(frozen=True)
class GRPO(ClippedPolicy):
    """With |o_i| the number of tokens of completion i, the losses are

    grpo      the mean over completions of the mean over their tokens
    dapo      the mean over all tokens (Yu et al. 2025)
    dr_grpo   the sum over all tokens, divided by the number of completions and by max_new. With scale="none" its
              gradient is unbiased: neither short answers nor easy prompts weigh more (Liu et al. 2025)
    """

    loss: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    scale: Literal["group", "batch", "none"] = "group"  # rewards whose standard deviation divides advantages
    ratio: Literal["token", "sequence"] = "token"  # sequence: the geometric mean of the ratios (GSPO)
    unbiased_kl: bool = True  # k3 times the ratio: of tokens, its gradient is that of the divergence (DeepSeek-V3.2)

    def check(self) -> None:
        super().check()
        require(self.group > 1, f"{self.kind}: group={self.group} must be at least 2, to compare completions")
        require(
            self.ratio == "token" or self.loss == "grpo",
            f"{self.kind}: ratio='sequence' is a mean over sequences; loss={self.loss!r} must be 'grpo' then",
        )

    def advantages(self, rewards: Tensor) -> Tensor:
        advantages = rewards - rewards.mean(1, keepdim=True)
        match self.scale:
            case "group":
                return advantages / (rewards.std(1, keepdim=True) + EPSILON)
            case "batch":
                return advantages / (rewards.std() + EPSILON)
            case "none":
                return advantages

    def sequence_weights(self, lengths: Tensor) -> Tensor:
        match self.loss:
            case "grpo":
                return lengths.mean() / lengths
            case "dapo":
                return torch.ones_like(lengths)
            case "dr_grpo":
                return lengths.mean().expand_as(lengths) / self.max_new

    def token_losses(self, scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = scores.logprobs
        log_ratio = logprobs - batch.old_logprobs.to(logprobs.dtype)
        weights = (batch.weights > 0).to(logprobs.dtype)
        if self.ratio == "sequence":
            lengths = sum_sequences(weights, batch.segments)
            log_ratio = sum_sequences(log_ratio, batch.segments) / lengths.clamp_min(1)
            weights = batch.weights  # the share of sequences
        losses, metrics = self.clipped(log_ratio, batch, weights)
        if "reference_logprobs" in batch:
            difference = batch.reference_logprobs.to(logprobs.dtype) - logprobs
            divergence = difference.exp() - 1 - difference
            if self.unbiased_kl:
                divergence = divergence * log_ratio.exp()
            losses = losses + self.kl * divergence
            metrics["kl"] = divergence.detach().sum()
        return losses, metrics


def reward_divergence(batch: Batch) -> dict[str, Tensor]:
    """Σ log π_old - log π_ref, the divergence that was subtracted from the rewards."""
    if "reference_logprobs" not in batch:
        return {}
    return {"kl": (batch.old_logprobs - batch.reference_logprobs).sum()}
