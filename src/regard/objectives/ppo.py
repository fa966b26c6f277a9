"""Proximal policy optimization: every token has an advantage, estimated with a value head. Schulman et al. 2017.

A completion has tokens 1 … T. With V_t the value before token t when the model sampled, R the reward of the completion,
and log π_old / π_ref the divergence of a token from the model before training:

    r_t = -kl · log(π_old / π_ref), + R for t = T             rewards of tokens (Ziegler et al. 2019)
    δ_t = r_t + γ V_{t+1} - V_t                               V_{T+1} = 0
    A_t = δ_t + γ λ A_{t+1}                                   generalized advantages (Schulman et al. 2015)
    G_t = A_t + V_t                                           returns

    loss_t = -min(ρ_t A_t, clip(ρ_t) A_t) + ½ c max((v_t - G_t)², (clip(v_t) - G_t)²)

ρ_t = π / π_old is clipped as in GRPO, and v_t, the value now, to V_t ± `value_clip`. The advantages of the loss have
mean 0 and standard deviation 1 over the rollout; the returns are not scaled. The loss is the mean over all tokens. A
completion that `max_new` has ended counts as complete.

With `target_kl`, `kl` is the first coefficient. After a rollout of n completions it is multiplied by
1 + min(n / horizon, 1) · min(max(KL / target_kl - 1, -0.2), 0.2), where KL is the mean of log(π_old / π_ref) over its
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.objectives.policy_gradient import ClippedPolicy, reward_divergence
from regard.objectives.reinforcement import ROLLOUT_METRICS
from regard.objectives.sequence_logprobs import TokenScores
from regard.spec import require

EPSILON = 1e-8  # added to the standard deviation of advantages
LARGEST_ERROR = 0.2  # of KL / target_kl - 1


@dataclass(frozen=True)
class PPO(ClippedPolicy):
    rollout_metrics: ClassVar[tuple[str, ...]] = (*ROLLOUT_METRICS, "kl_coefficient", "explained_variance")
    needs_values = True

    group: int = 1
    kl: float = 0.05
    epochs: int = 4
    gamma: float = 1.0
    lam: float = 0.95  # λ
    normalize_advantages: bool = True  # to mean 0 and standard deviation 1 over the rollout
    value_weight: float = 0.1  # c
    value_clip: float = 0.2
    target_kl: float | None = None  # nats per token, to which `kl` is adapted; None: `kl` stays as it is
    horizon: int = 1000  # completions; the smaller, the faster is `kl` adapted

    def check(self) -> None:
        super().check()
        for name in ("gamma", "lam"):
            require(0 <= getattr(self, name) <= 1, f"{self.kind}: {name}={getattr(self, name)} must be in [0, 1]")
        for name in ("value_weight", "value_clip", "horizon"):
            require(getattr(self, name) > 0, f"{self.kind}: {name}={getattr(self, name)} must be positive")
        require(
            self.target_kl is None or self.target_kl > 0 and self.kl > 0,
            f"{self.kind}: target_kl={self.target_kl} adapts kl={self.kl}; both must be positive",
        )

    def token_fields(self, batches: Sequence[Batch], rewards: Tensor, kl: float) -> list[dict[str, Tensor]]:
        """`advantages` and `returns`."""
        fields = []
        for batch, totals in zip(batches, rewards.split([batch.size for batch in batches]), strict=True):
            counted, values = batch.weights > 0, batch.old_values.double()
            received = token_rewards(batch, totals, kl)
            advantages = generalized_advantages(received, values, counted, self.gamma, self.lam)
            returns = torch.where(counted, advantages + values, 0)
            fields.append({"advantages": advantages, "returns": returns})
        if self.normalize_advantages:
            sampled = [field["advantages"][batch.weights > 0] for field, batch in zip(fields, batches, strict=True)]
            mean, std = torch.cat(sampled).mean(), torch.cat(sampled).std(correction=0) + EPSILON
            for field, batch in zip(fields, batches, strict=True):
                field["advantages"] = torch.where(batch.weights > 0, (field["advantages"] - mean) / std, 0)
        return [{name: tensor.float() for name, tensor in field.items()} for field in fields]

    def measure(self, batches: Sequence[Batch], kl: float) -> list[float]:
        chosen = [(batch.returns[batch.weights > 0], batch.old_values[batch.weights > 0]) for batch in batches]
        returns, values = (torch.cat(column).double() for column in zip(*chosen, strict=True))
        return [kl, explained_variance(returns, values)]

    def next_kl(self, batches: Sequence[Batch], kl: float) -> float:
        if self.target_kl is None:
            return kl
        tokens = sum(int((batch.weights > 0).sum()) for batch in batches)
        divergence = sum(float((batch.old_logprobs - batch.reference_logprobs).double().sum()) for batch in batches)
        completions = sum(batch.size for batch in batches)
        return adapted_kl(kl, divergence / tokens, self.target_kl, completions / self.horizon)

    def sequence_weights(self, lengths: Tensor) -> Tensor:
        return torch.ones_like(lengths)

    def token_losses(self, scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert scores.values is not None, "the model has a value head"
        logprobs, dtype = scores.logprobs, scores.logprobs.dtype
        losses, metrics = self.clipped(logprobs - batch.old_logprobs.to(dtype), batch, batch.weights)
        values, old, returns = (tensor.to(dtype) for tensor in (scores.values, batch.old_values, batch.returns))
        errors = (values - returns).square()
        near_errors = (old + (values - old).clamp(-self.value_clip, self.value_clip) - returns).square()
        value_losses = 0.5 * torch.maximum(errors, near_errors)
        metrics["value_loss"] = (batch.weights * value_losses.detach()).sum()
        metrics["value_clip_fraction"] = (batch.weights * (near_errors > errors)).sum().to(dtype)
        return losses + self.value_weight * value_losses, metrics | reward_divergence(batch)


def token_rewards(batch: Batch, rewards: Tensor, kl: float) -> Tensor:
    """r_t (B, L) in float64; rewards (B,) of the completions, which are received at their last tokens."""
    counted = batch.weights > 0
    last = counted & (counted.flip(1).cumsum(1).flip(1) == 1)
    received = torch.where(last, rewards.double().unsqueeze(1), 0)
    if not kl:
        return received
    return received - kl * (batch.old_logprobs - batch.reference_logprobs).double()


def generalized_advantages(rewards: Tensor, values: Tensor, counted: Tensor, gamma: float, lam: float) -> Tensor:
    """All (B, L) -> A_t (B, L), 0 for tokens that do not count; those that count follow each other in every row."""
    advantages = torch.zeros_like(values)
    next_advantage, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(counted[:, t], delta + gamma * lam * next_advantage, 0)
        next_advantage = torch.where(counted[:, t], advantages[:, t], next_advantage)
        next_value = torch.where(counted[:, t], values[:, t], next_value)
    return advantages


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """1 - Var(G - V) / Var(G): 1 if the values are the returns, 0 if they are as good as a constant; 0 for equal
    returns."""
    variance = returns.var(correction=0)
    return float(1 - (returns - values).var(correction=0) / variance) if variance else 0.0


def adapted_kl(kl: float, measured: float, target: float, gain: float) -> float:
    """The coefficient for the next rollout."""
    error = min(max(measured / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return kl * (1 + min(gain, 1.0) * error)
