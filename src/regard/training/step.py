"""One training step, and evaluation: sums over a batch, divided once by its count.

    g = Σ ∇ loss_sum / Σ count over the micro-batches          g ← g · min(1, clip / ‖g‖)

A batch may be split into micro-batches to save memory. A loss or gradient that is not finite is detected before any
weight changes. Precision and compilation are run-time choices and are not saved.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from regard.compat import cannot_compile
from regard.data.batch import Batch
from regard.objectives.base import LossFunction
from regard.training.faults import NonFinite

Precision = Callable[[], AbstractContextManager]
BeforeUpdate = Callable[[dict[str, float], float], None]


def take_step(
    model: nn.Module,
    objective: LossFunction,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    clip: float = 0.0,
    micro_batches: int = 1,
    precision: Precision = nullcontext,
    before_update: BeforeUpdate | None = None,
) -> dict[str, float]:
    """Update the weights; returns `loss`, the objective's metrics, and `grad_norm` before clipping.

    before_update: called with these values and the count while the gradients are still sums; it may add values, or
    raise a StepFault, and then the weights do not change.
    """
    sums = []
    for micro_batch in split_batch(batch, micro_batches, getattr(objective, "scope", "token")):
        with precision():
            loss, count, metrics = objective(model, micro_batch)
        loss.backward()
        sums.append({"loss": loss.detach(), "count": count, **metrics})
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = get_total_norm(gradients)
    # Values are copied to the CPU only from here on: a GPU runs the code above asynchronously, except for one
    # comparison in next_token.
    totals = {name: sum(float(values[name]) for values in sums) for name in sums[0]}
    count = totals.pop("count")
    means = {name: total / count if count else math.nan for name, total in totals.items()}
    means["grad_norm"] = float(norm) / count if count else math.nan
    try:
        require_finite(means, [float(values["loss"]) for values in sums], batch.size)
        if before_update is not None:
            before_update(means, count)
        scale = min(1.0, clip / means["grad_norm"]) if clip and means["grad_norm"] else 1.0
        torch._foreach_mul_(gradients, scale / count)
        optimizer.step()
    finally:
        optimizer.zero_grad()
    return means


def split_batch(batch: Batch, count: int, scope: str = "token") -> Iterator[Batch]:
    """`count` micro-batches of equal size."""
    rows = batch.size
    if rows % count:
        raise ValueError(f"a batch of {rows} rows cannot be split into accumulate={count} equal parts; use a divisor")
    if scope == "batch" and count > 1:
        raise ValueError(f"accumulate={count}: this loss compares all rows of a batch; set accumulate=1")
    size = rows // count
    return (batch.rows(slice(start, start + size)) for start in range(0, rows, size))


def require_finite(means: dict[str, float], losses: list[float], rows: int) -> None:
    size = rows // len(losses)
    for i, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise NonFinite(f"the loss of rows {i * size} to {(i + 1) * size - 1} is {loss}")
    if not math.isfinite(means["loss"]):
        raise NonFinite("all weights of the batch are zero, so its mean loss is undefined")
    if not math.isfinite(means["grad_norm"]):
        raise NonFinite(f"the norm of the gradient is {means['grad_norm']}")


@torch.no_grad()
def evaluate(
    model: nn.Module, objective: LossFunction, batches: Iterable[Batch], precision: Precision = nullcontext
) -> dict[str, float]:
    """`loss` and the objective's metrics over all batches, in eval mode; the model's mode is restored."""
    device, mode = next(model.parameters()).device, model.training
    model.eval()
    count, sums = 0.0, {}
    for batch in batches:
        with precision():
            loss, weight, metrics = objective(model, batch.to(device))
        count += float(weight)
        for name, value in {"loss": loss, **metrics}.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    model.train(mode)
    return {name: value / count if count else math.nan for name, value in sums.items()}


def autocast(precision: str, device: torch.device) -> Precision:
    """The context manager for computing the loss. Weights stay float32; on CUDA matrix products run in bfloat16."""
    if precision == "bfloat16" and device.type != "cuda":
        raise ValueError("precision='bfloat16' needs a CUDA device (CPUs emulate it, slowly); use 'auto' or 'float32'")
    if precision == "float32" or device.type != "cuda":
        return nullcontext
    return partial(torch.autocast, "cuda", dtype=torch.bfloat16)


def compile_model(model: nn.Module, device: torch.device, note: Callable[[str], None]) -> nn.Module:
    """The compiled model, with the same parameters. Without torch.compile, the model itself, and `note` is called."""
    reason = cannot_compile(device)
    if reason is not None:
        note(reason)
        return model
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    return compiled
