"""The training loop: one for every objective, model and device.

Each batch of the loader is one step (step.py). After a signal, a kill or a crash, training resumes from the newest
complete checkpoint: weights, moments, random generators and the loader's position are restored (resume_state.py), and
the log is truncated to that step (log.py). The steps that follow are bit-identical to those of an undisturbed run on
the same machine, thread count and torch.
"""

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from regard.checkpoint.atomic_folder import write_folder
from regard.checkpoint.model_folder import SavesFiles
from regard.data.batch import Batch
from regard.objectives.base import LossFunction
from regard.training.ema import MovingAverage
from regard.training.log import Log
from regard.training.optimizer import set_learning_rate
from regard.training.progress import Listener
from regard.training.recipe import Training
from regard.training.resume_state import StatefulLoader, TrainingPosition, load_state, write_state, write_weights
from regard.training.run import Run
from regard.training.step import NonFinite, autocast, compile_model, evaluate, take_step


@dataclass(frozen=True)
class TrainingResult:
    step: int
    finished: bool  # False: stopped by a signal before the last step
    record: dict[str, Any]  # of the last step, as in metrics.jsonl; empty if no step was taken
    evaluation: dict[str, Any]  # the last evaluation, as in metrics.jsonl; empty if there was none

    @property
    def exit_code(self) -> int:
        return 0 if self.finished else 130


class StopSignal:
    """`requested` becomes true on the first signal; the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, number: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_on_signals() -> Generator[StopSignal]:
    """Handle Ctrl-C and SIGTERM: the current step is finished and saved; a second signal aborts at once."""
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield stop
        return
    previous = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class Trainer:
    """A model, its data and its settings.

    held_out: the batches of every evaluation; sample: returns a generated text, which every evaluation logs;
    tokenizer: saved with the model. base: the folder of the model that adapters belong to.
    """

    model: nn.Module
    loader: StatefulLoader
    objective: LossFunction
    settings: Training
    run: Run
    held_out: Iterable[Batch] = ()
    sample: Callable[[nn.Module], str] | None = None
    tokenizer: SavesFiles | None = None
    base: str | None = None
    listener: Listener = field(default_factory=Listener)

    def train(self) -> TrainingResult:
        """Start or resume, and train until `settings.steps` or a signal. Seeds torch's global generator."""
        with self.run.locked():
            self.prepare()
            position = self.restore()
            if position.step >= self.settings.steps:
                self.listener.note(f"{self.run.path} is already finished at step {position.step}; nothing to train")
            self.listener.started(position.step, self.settings.steps)
            try:
                with Log(self.run.path, position.step) as log, stop_on_signals() as stop:
                    result = self.loop(position, log, stop)
            finally:
                self.listener.ended()
        if not result.finished:
            self.listener.note(
                f"stopped at step {result.step} and saved; to resume: regard train --resume {self.run.path}"
            )
        return result

    def loop(self, position: TrainingPosition, log: Log, stop: StopSignal) -> TrainingResult:
        steps, saved = self.settings.steps, position
        record, evaluation = {}, {}
        batches = iter(self.loader)
        while position.step < steps and not stop.requested:
            position, record = self.step(batches, position)
            log.write(record)
            self.listener.stepped(record)
            if is_due(self.settings.evaluate_every, position.step, steps):
                evaluation = self.evaluate(position, log)
            if is_due(self.settings.save_every, position.step, steps):
                saved = self.save(position, log)
        if saved != position:
            self.save(position, log)
        if position.step >= steps and self.ema.average:
            with self.ema.applied(), write_folder(self.run.path / "ema") as folder:
                write_weights(folder, self.model, self.tokenizer, self.base)
        return TrainingResult(position.step, position.step >= steps, record, evaluation)

    def prepare(self) -> None:
        settings = self.settings
        torch.manual_seed(settings.seed)
        self.device = next(self.model.parameters()).device
        self.precision = autocast(settings.precision, self.device)
        self.optimizer = settings.build_optimizer(self.model)
        self.ema = MovingAverage(self.model, settings.ema)
        self.forward_model = (
            compile_model(self.model, self.device, self.listener.note) if settings.compile else self.model
        )
        self.model.train()

    def step(self, batches: Iterator[Batch], position: TrainingPosition) -> tuple[TrainingPosition, dict[str, Any]]:
        """One step; returns the position after it, and its record."""
        start, settings = time.perf_counter(), self.settings
        batch = next(batches)
        tokens = batch.token_count
        lr = settings.lr * settings.schedule.factor(position.step, settings.steps)
        set_learning_rate(self.optimizer, lr)
        position = TrainingPosition(position.step + 1, position.tokens + tokens)
        batch = batch.to(self.device)
        try:
            values = take_step(
                self.forward_model, self.objective, batch, self.optimizer,
                settings.clip, settings.accumulate, self.precision,
            )  # fmt: skip
            self.ema.update()
        except NonFinite as error:
            values = {"loss": None, "skipped": self.skip(position, error)}
        seconds = time.perf_counter() - start
        record = {"step": position.step, **values, "lr": lr, "tokens": position.tokens}
        return position, record | {"seconds": seconds, "tokens_per_second": tokens / seconds}

    def skip(self, position: TrainingPosition, error: NonFinite) -> str:
        """Apply the policy for a batch whose loss or gradient is not finite; returns the reason for the skip."""
        reason = f"step {position.step}, batch {position.step} of the loader: {error}"
        if self.settings.nonfinite == "stop":
            remedy = "lower lr, inspect the batch, or skip it with nonfinite='skip'"
            raise NonFinite(
                f"{reason}. The weights are those of step {position.step - 1}; to continue, {remedy}"
            ) from error
        self.listener.note(f"{reason}. The step is skipped, the weights are unchanged")
        return str(error)

    def evaluate(self, position: TrainingPosition, log: Log) -> dict[str, Any]:
        """Evaluate the held-out batches and log a sample; the random generators are left unchanged."""
        record: dict[str, Any] = {"step": position.step}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), self.ema.applied():
            values = evaluate(self.forward_model, self.objective, self.held_out, self.precision)
            if values:
                record |= {f"held_out_{name}": value for name, value in values.items()}
                log.write(record)
                self.listener.evaluated(record)
            if self.sample is not None:
                self.model.eval()
                log.sample(position.step, self.sample(self.model))
                self.model.train()
        return record

    def save(self, position: TrainingPosition, log: Log) -> TrainingPosition:
        log.sync()
        with self.run.saving(position.step, self.settings.keep) as folder:
            write_state(folder, position, self.model, self.optimizer, self.loader, self.tokenizer, self.base)
            self.ema.save(folder)
        self.listener.saved(self.run.checkpoint(position.step))
        return position

    def restore(self) -> TrainingPosition:
        """Load the newest complete checkpoint; returns its position, or the start if there is none."""
        folder = self.run.latest(self.listener.note)
        position = load_state(folder, self.model, self.optimizer, self.loader) if folder else TrainingPosition()
        if folder:
            self.ema.load(folder)
        self.run.discard_after(position.step)
        return position


def is_due(every: int, step: int, steps: int) -> bool:
    return step == steps or every > 0 and step % every == 0
