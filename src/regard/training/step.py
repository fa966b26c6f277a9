"""One step of training: gradients of a batch, checked, divided once, clipped, applied.

    g = Σ_parts ∇ loss_sum / Σ_parts count          g ← g · min(1, clip / ‖g‖)

The batch may be cut into parts that go through the model one after another, to save memory. A loss or a gradient that
is no number is found before anything is changed.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from regard.data.batch import Batch
from regard.objectives.base import Objective
from regard.training.runtime import Precision


class NonFinite(ArithmeticError):
    """A loss or gradient that is no number; weights and moments are as they were."""


def take_step(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    clip: float = 0.0,
    parts: int = 1,
    precision: Precision = nullcontext,
) -> dict[str, float]:
    """Update the weights at the optimizer's rate; -> `loss`, the objective's metrics, `grad_norm` before clipping."""
    sums = []
    for part in cut(batch, parts, getattr(objective, "scope", "token")):
        with precision():
            loss, count, metrics = objective(model, part)
        loss.backward()
        sums.append({"loss": loss.detach(), "count": count, **metrics})
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = get_total_norm(gradients)
    # From here on numbers are read. On a GPU all above was only queued, but for one question of next_token's.
    totals = {name: sum(float(part[name]) for part in sums) for name in sums[0]}
    count = totals.pop("count")
    means = {name: total / count if count else math.nan for name, total in totals.items()}
    means["grad_norm"] = float(norm) / count if count else math.nan
    try:
        require_finite(means, [float(part["loss"]) for part in sums], batch.size)
        shorten = min(1.0, clip / means["grad_norm"]) if clip and means["grad_norm"] else 1.0
        torch._foreach_mul_(gradients, shorten / count)
        optimizer.step()
    finally:
        optimizer.zero_grad()
    return means


def cut(batch: Batch, parts: int, scope: str = "token") -> Iterator[Batch]:
    rows = batch.size
    if rows % parts:
        raise ValueError(f"a batch of {rows} rows cannot be cut into accumulate={parts} equal parts; choose a divisor")
    if scope == "batch" and parts > 1:
        raise ValueError(f"accumulate={parts}: this loss compares all rows of a batch; set accumulate=1")
    size = rows // parts
    return (batch.rows(slice(start, start + size)) for start in range(0, rows, size))


def require_finite(means: dict[str, float], losses: list[float], rows: int) -> None:
    size = rows // len(losses)
    for part, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise NonFinite(f"the loss of rows {part * size} to {(part + 1) * size - 1} is {loss}")
    if not math.isfinite(means["loss"]):
        raise NonFinite("none of its tokens counts: all weights are zero")
    if not math.isfinite(means["grad_norm"]):
        raise NonFinite(f"the norm of its gradient is {means['grad_norm']}")
