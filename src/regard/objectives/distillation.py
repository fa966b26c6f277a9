"""Distillation: a decoder learns the next-token distributions of another one, its teacher. Hinton et al. 2015.

    loss = Σ_t w_t · (λ D(p_t, q_t) + (1 - λ) · -log p_t(token_{t+1}))          p: model, q: teacher, at a temperature

    β = 0       D = KL(q ‖ p)                           forward KL: p covers all that is likely under q
    β = 1       D = KL(p ‖ q)                           reverse KL: p avoids what is unlikely under q (Gu et al. 2023)
    0 < β < 1   D = β KL(q ‖ m) + (1 - β) KL(p ‖ m)     generalised Jensen-Shannon divergence, of the mixture
                                                        m = β q + (1 - β) p (Agarwal et al. 2023)

λ is the `weight` of the divergence. Examples, rows and the tokens that count are those of next_token. With `on_policy`
some batches are completions that the model samples instead, of the prompts of the examples. The teacher has the same
vocabulary; training loads it once, frozen (training/teacher.py). Logits of both exist for one chunk of tokens at a
time, and are computed again in the backward.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.data.batch import Batch
from regard.data.sources.base import Splits
from regard.kernels.linear_cross_entropy import CHUNK, GPU_CHUNK
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.outputs import LazyLogits, materialize
from regard.objectives.base import LossResult, add_losses, cross_entropy, layout_of, require_model
from regard.objectives.next_token import NextToken
from regard.objectives.reinforcement import prompt_of
from regard.spec import require


@dataclass(frozen=True)
class Distillation(NextToken):
    teacher: str = ""  # a run, a folder, or the name of a packaged model
    teacher_weights: str = ""  # their fingerprint, found at the start of a run
    beta: float = 0.0  # 0: forward KL, 1: reverse KL, between: generalised Jensen-Shannon divergence
    temperature: float = 1.0  # of both distributions in the divergence; its gradients are not scaled by T²
    weight: float = 1.0  # of the divergence; the rest is that of the ordinary loss
    on_policy: float = 0.0  # the share of batches with completions that the model samples (training/on_policy.py)
    max_new: int = 128  # tokens per sampled completion

    def check(self) -> None:
        super().check()
        for name in ("beta", "weight", "on_policy"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{self.kind}: {name}={value} must be in [0, 1]")
        require(self.temperature > 0, f"{self.kind}: temperature={self.temperature} must be positive")
        require(self.max_new >= 1, f"{self.kind}: max_new={self.max_new} must be at least 1")
        require(
            self.on_policy == 0 or self.weight == 1,
            f"{self.kind}: on_policy={self.on_policy} needs weight=1, not {self.weight}: the ordinary loss would teach "
            "the model its own samples",
        )
        require(
            self.z_loss == 0 or self.weight < 1,
            f"{self.kind}: z_loss={self.z_loss} belongs to the ordinary loss, which weight=1 leaves out; lower one"
            " of them",
        )

    def fit(self, splits: Splits, model: Model) -> Self:
        if self.on_policy:
            prompt_of(splits.train.example(0))
        return super().fit(splits, model)

    def check_model(self, model: Model) -> None:
        fits = isinstance(model, Decoder) and not model.ahead
        require_model(self, model, fits, "a decoder without `ahead` blocks")

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        raise ValueError(
            "distillation needs its teacher; use regard.training.teacher.TaughtObjective(objective, teacher)"
        )

    def distill(self, model: nn.Module, teacher: nn.Module, batch: Batch) -> LossResult:
        """Needs tokens, targets, weights, positions and segments, all (B, L)."""
        layout = layout_of(batch)
        with torch.no_grad():
            taught = teacher(batch.tokens, layout, outputs=True).logits
        outputs = model(batch.tokens, layout, outputs=True)
        weights = batch.weights.to(torch.promote_types(outputs.logits.dtype, torch.float32))
        chosen, count = weights > 0, weights.sum()
        values = token_divergence(select(outputs.logits, chosen), select(taught, chosen), self.beta, self.temperature)
        distance = (values * weights[chosen]).sum()
        loss, metrics = self.weight * distance, {"divergence": distance.detach()}
        if self.weight < 1:
            likelihood, correct = cross_entropy(outputs.logits, batch.targets, weights, z_loss=self.z_loss)
            loss = loss + (1 - self.weight) * likelihood
            metrics |= {"next_token": likelihood.detach(), "accuracy": correct}
        return add_losses(loss, count, outputs.losses, metrics)


def select(logits: Tensor | LazyLogits, chosen: Tensor) -> Tensor | LazyLogits:
    return logits.select(chosen) if isinstance(logits, LazyLogits) else logits[chosen]


def token_divergence(
    student: Tensor | LazyLogits,
    teacher: Tensor | LazyLogits,
    beta: float = 0.0,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """The divergence of each of T tokens (T,); the logits of `chunk_size` tokens are in memory at a time."""
    rows, others = (logits.hidden if isinstance(logits, LazyLogits) else logits for logits in (student, teacher))
    vocab = len(student.weight) if isinstance(student, LazyLogits) else student.shape[-1]
    chunk_size = chunk_size or max(1, (GPU_CHUNK if rows.is_cuda else CHUNK) // vocab)

    def part(rows: Tensor, others: Tensor) -> Tensor:
        return divergence(logits_of(student, rows), logits_of(teacher, others).detach(), beta, temperature)

    chunks = list(zip(rows.split(chunk_size), others.split(chunk_size), strict=True))
    if len(chunks) == 1:
        return part(rows, others)
    return torch.cat([checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks])


def logits_of(source: Tensor | LazyLogits, rows: Tensor) -> Tensor:
    """The logits of some rows of the source."""
    return materialize(source._replace(hidden=rows)) if isinstance(source, LazyLogits) else rows


def divergence(student: Tensor, teacher: Tensor, beta: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Logits (…, V) of both -> the divergence (…), of distributions at this temperature; in at least float32."""
    wide = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = ((logits.to(wide) / temperature).log_softmax(-1) for logits in (student, teacher))
    if beta == 0:
        return kl(log_q, log_p)
    if beta == 1:
        return kl(log_p, log_q)
    mixture = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    return beta * kl(log_q, mixture) + (1 - beta) * kl(log_p, mixture)


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a ‖ b) over the last dimension."""
    return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)
