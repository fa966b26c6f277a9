"""Progress of training: a bar in a terminal, plain lines elsewhere, or any other listener.

The loop calls a listener's methods at its events. The base class ignores all of them. At the start a summary lists
parameters, tokens, epochs of finite data, device and precision.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from regard.adapt.quantized import QuantizedLinear, count_stored_weights
from regard.training.recipe import Training

SHOWN = ("reward", "kl", "margin")  # metrics beside the loss, of objectives that have them
MOST_SKIPPED = 1.5  # size of the data divided by that of an epoch; above it, the summary says what an epoch is
Record = Mapping[str, Any]  # a line of metrics.jsonl


class Listener:
    def summary(self, lines: Sequence[str]) -> None:
        """The sizes of the model, the data and the run, before training starts."""

    def prepared(self, work: str, done: int, total: int) -> None:
        """A part of the work before training is done; `work` says which."""

    def started(self, step: int, steps: int) -> None:
        """Training starts after `step` (0: a new run)."""

    def stepped(self, record: Record) -> None:
        """A step was taken."""

    def evaluated(self, record: Record) -> None:
        """Held-out batches were evaluated."""

    def saved(self, folder: Path) -> None:
        """A checkpoint was written."""

    def note(self, text: str) -> None:
        """A message for the user."""

    def ended(self) -> None:
        """The loop ended, normally or by an exception."""


class Rate:
    """Tokens per second, as an exponential moving average."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, record: Record) -> float:
        rate = record["tokens_per_second"]
        self.value = 0.9 * self.value + 0.1 * rate if self.value else rate
        return self.value


class Bar(Listener):
    """Step, loss, tokens per second and remaining time, in one line that is updated in place."""

    def __init__(self, console: Console):
        self.console, self.rate = console, Rate()
        columns = [
            TextColumn("{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
        ]
        self.bar = Progress(*columns, TimeRemainingColumn(compact=True), console=console, refresh_per_second=4)

    def summary(self, lines: Sequence[str]) -> None:
        self.note("\n".join(lines))

    def prepared(self, work: str, done: int, total: int) -> None:
        tasks = [task.id for task in self.bar.tasks if task.description == work]
        task = tasks[0] if tasks else self.bar.add_task(work, status="")
        self.bar.start()
        self.bar.update(task, completed=done, total=total)
        if done == total:
            self.bar.remove_task(task)
            self.bar.stop()

    def started(self, step: int, steps: int) -> None:
        self.task = self.bar.add_task("training", total=steps, completed=step, status="")
        self.bar.start()

    def stepped(self, record: Record) -> None:
        status = f"{format_step(record)}  {self.rate.add(record):,.0f} tokens/s"
        self.bar.update(self.task, completed=record["step"], status=status)

    def evaluated(self, record: Record) -> None:
        self.bar.print(format_evaluation(record), highlight=False)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def ended(self) -> None:
        self.bar.stop()


class Lines(Listener):
    """One line every few seconds, for log files and pipes."""

    def __init__(self, console: Console, every_seconds: float = 10.0):
        self.console, self.every, self.rate = console, every_seconds, Rate()
        self.last = -float("inf")

    def summary(self, lines: Sequence[str]) -> None:
        self.note("\n".join(lines))

    def prepared(self, work: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.last >= self.every or done == total:
            self.last = now
            self.note(f"{work}: {done} of {total}")

    def started(self, step: int, steps: int) -> None:
        self.steps = steps

    def stepped(self, record: Record) -> None:
        rate, now = self.rate.add(record), time.monotonic()
        if now - self.last < self.every and record["step"] < self.steps:
            return
        self.last = now
        tokens_left = (self.steps - record["step"]) * record["tokens_per_second"] * record["seconds"]
        self.note(
            f"step {record['step']}/{self.steps}  {format_step(record)}  {rate:,.0f} tokens/s  "
            f"{format_duration(tokens_left / rate if rate else 0.0)} left"
        )

    def evaluated(self, record: Record) -> None:
        self.note(format_evaluation(record))

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def progress_listener(console: Console | None = None) -> Listener:
    """A bar if the console is a terminal, else lines."""
    console = console or Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines(console)


def format_step(record: Record) -> str:
    if record["loss"] is None:
        return "loss skipped"
    return "  ".join(f"{name} {format_value(record[name])}" for name in ("loss", *SHOWN) if name in record)


def format_value(value: float) -> str:
    return f"{round(value, 4) + 0.0:.4f}"  # + 0.0: a small negative number is shown as 0, not as -0


def format_evaluation(record: Record) -> str:
    values = "  ".join(f"{k.removeprefix('held_out_')} {format_value(v)}" for k, v in record.items() if k != "step")
    return f"step {record['step']}  held out: {values}"


def format_duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@runtime_checkable
class SizedLoader(Protocol):
    """A loader that knows the sizes of its batches and of its data."""

    unit: str  # tokens or examples
    step_size: int  # of the largest batches

    def total_size(self, steps: int) -> int: ...

    def epoch_size(self) -> int | None: ...

    def data_size(self) -> int | None: ...


def summarize(model: nn.Module, loader: object, settings: Training, device: torch.device) -> list[str]:
    """One line each for the parameters, the steps, the data if it is finite, and the device."""
    parameters = list(model.parameters())
    total, trained = (sum(p.numel() for p in ps) for ps in (parameters, [p for p in parameters if p.requires_grad]))
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    quantized = count_stored_weights(model)
    total += quantized
    stored = f", {quantized:,} stored as {layers[0].format.kind}" if layers else ""
    share = "all trained" if trained == total else f"{trained:,} trained ({trained / total:.2%})"
    autocast = device.type == "cuda" and settings.precision != "float32"
    products = "FP8 products, " if settings.precision == "fp8" else ""
    return [
        f"parameters: {total:,}, {share}{stored}",
        *describe_data(loader, settings.steps),
        f"device: {device}, {products}{'bfloat16 autocast, weights in ' if autocast else ''}{dtypes(parameters)}",
    ]


def describe_data(loader: object, steps: int) -> list[str]:
    if not isinstance(loader, SizedLoader):
        return [f"steps: {steps:,}"]
    total, epoch, data, unit = loader.total_size(steps), loader.epoch_size(), loader.data_size(), loader.unit
    lines = [f"steps: {steps:,} of up to {loader.step_size:,} {unit}, {total:,} in total"]
    if epoch is None or data is None:
        return lines
    epochs = f"so the run has {total / max(epoch, 1):.1f} epochs"
    if data <= MOST_SKIPPED * epoch:
        return [*lines, f"data: about {epoch:,} {unit}, {epochs}"]
    slices = f"an epoch takes one slice of each document, {epoch:,} {unit} in all, {epochs}"
    return [*lines, f"data: about {data:,} {unit}; {slices} and reads {total / data:.1f} times the size of the data"]


def dtypes(parameters: list[nn.Parameter]) -> str:
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
