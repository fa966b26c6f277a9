"""One training step, and evaluation: sums over a batch, divided once by its count.

    g = Σ ∇ loss_sum / Σ count over the micro-batches of all processes          g ← g · min(1, clip / ‖g‖)

A batch may be split into micro-batches to save memory, and over processes (`Reduction`; parallel/). A loss or gradient
that is not finite is detected before any weight changes, by all processes alike. Precision and compilation are run-time
choices and are not saved.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from regard.compat import cannot_compile, share_derived_tensors
from regard.data.batch import Batch
from regard.objectives.base import LossFunction
from regard.training.faults import NonFinite

Precision = Callable[[], AbstractContextManager]
BeforeUpdate = Callable[[dict[str, float], float], None]


class Reduction:
    """Combines the sums and gradients of all processes. This one is for a single process, and changes nothing."""

    ranks = 1  # processes with different rows

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """A context for the backward of a micro-batch; gradients are complete after that of the last one."""
        return nullcontext()

    def gather(self, sums: list[list[float]]) -> list[list[float]]:
        """The rows of all processes, in the order of their batch rows."""
        return sums

    def gradients(self, parameters: Iterable[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The gradients in this process, and the norm of the whole gradient, of which they may be shards."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return gradients, get_total_norm(gradients)


SINGLE_PROCESS = Reduction()


def take_step(
    model: nn.Module,
    objective: LossFunction,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    clip: float = 0.0,
    micro_batches: int = 1,
    precision: Precision = nullcontext,
    before_update: BeforeUpdate | None = None,
    reduction: Reduction = SINGLE_PROCESS,
) -> dict[str, float]:
    """Update the weights; returns `loss`, the objective's metrics, and `grad_norm` before clipping.

    before_update: called with these values and the count while the gradients are still sums; it may add values, or
    raise a StepFault, and then the weights do not change.
    """
    sums = []
    for i, micro_batch in enumerate(split_batch(batch, micro_batches, getattr(objective, "scope", "token"))):
        with reduction.micro_batch(last=i + 1 == micro_batches):
            with precision():
                loss, count, metrics = objective(model, micro_batch)
            loss.backward()
        sums.append({"loss": loss.detach(), "count": count, **metrics})
    gradients, norm = reduction.gradients(p for group in optimizer.param_groups for p in group["params"])
    # Values are copied to the CPU only from here on: a GPU runs the code above asynchronously, except where an
    # objective reads a value, as in layout_of.
    rows = reduction.gather([[float(values[name]) for name in sums[0]] for values in sums])
    columns = dict(zip(sums[0], zip(*rows, strict=True), strict=True))
    totals = {name: sum(values) for name, values in columns.items()}
    count = totals.pop("count")
    means = {name: total / count if count else math.nan for name, total in totals.items()}
    means["grad_norm"] = float(norm) / count if count else math.nan
    try:
        require_finite(means, columns["loss"], batch.size * reduction.ranks)
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


def cut_rows(batch: Batch, parts: int) -> Batch:
    """The same tokens in rows of a `parts`-th of the length; a token attends only within its part of the row."""
    if parts == 1:
        return batch
    shapes = {tuple(tensor.shape) for tensor in batch.values()}
    if len(shapes) > 1 or len(min(shapes)) != 2 or min(shapes)[1] % parts:
        raise ValueError(f"length_warmup cannot cut rows into {parts} parts: {batch}; set it to 0")
    return Batch(**{name: tensor.reshape(parts * len(tensor), -1) for name, tensor in batch.items()})


def require_finite(means: dict[str, float], losses: Sequence[float], rows: int) -> None:
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
    model: nn.Module,
    objective: LossFunction,
    batches: Iterable[Batch],
    precision: Precision = nullcontext,
    reduction: Reduction = SINGLE_PROCESS,
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
    count, *totals = map(sum, zip(*reduction.gather([[count, *sums.values()]]), strict=True))
    return {name: value / count if count else math.nan for name, value in zip(sums, totals, strict=True)}


def autocast(precision: str, device: torch.device) -> Precision:
    """The context manager for computing the loss. Weights stay float32; on CUDA matrix products run in bfloat16.

    With "fp8", Trainer also replaces linear layers (adapt/fp8.py); all other operations run in bfloat16.
    """
    if precision in ("bfloat16", "fp8") and device.type != "cuda":
        raise ValueError(
            f"precision='{precision}' needs a CUDA device (CPUs emulate it, slowly); use 'auto' or 'float32'"
        )
    if precision == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("precision='fp8' needs a GPU of compute capability 8.9 or newer; use 'bfloat16'")
    if precision == "float32" or device.type != "cuda":
        return nullcontext
    return partial(torch.autocast, "cuda", dtype=torch.bfloat16)


def compile_model(model: nn.Module, device: torch.device, note: Callable[[str], None]) -> nn.Module:
    """The compiled model, with the same parameters. Without torch.compile, the model itself, and `note` is called."""
    reason = cannot_compile(device)
    if reason is not None:
        note(reason)
        return model
    share_derived_tensors()
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    return compiled
