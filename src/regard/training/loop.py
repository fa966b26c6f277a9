"""The training loop: there is one, for every objective, model and device.

Each batch of the loader is one step (step.py). After a stop, a kill or a crash, training goes on from the newest whole
checkpoint as if nothing had happened: weights, moments, generators and the loader's place come back (state.py), the log
is cut to that step (log.py), and what follows is bit-identical on the same machine, thread count and torch.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from regard.checkpoint.model_folder import SavesFiles
from regard.data.batch import Batch
from regard.models.decoder import DecoderModule
from regard.objectives.base import Objective
from regard.training.config import Training
from regard.training.evaluate import evaluate
from regard.training.interrupt import StopSignal, stop_on_signals
from regard.training.log import Log
from regard.training.progress import Listener
from regard.training.run import Run
from regard.training.runtime import autocast, compiled
from regard.training.state import StatefulLoader, TrainingPosition, load_state, write_state
from regard.training.step import NonFinite, take_step


@dataclass(frozen=True)
class TrainingResult:
    step: int
    finished: bool  # False: a signal ended it before its time
    record: dict[str, Any]  # of the last step, as in metrics.jsonl; empty if none was left to take
    evaluation: dict[str, Any]  # the last one, likewise

    @property
    def exit_code(self) -> int:
        return 0 if self.finished else 130


@dataclass
class Trainer:
    """Everything that a training needs. `held_out` is gone through anew at every evaluation, and `sample` writes a text
    then; the tokenizer is saved with the model."""

    model: DecoderModule
    loader: StatefulLoader
    objective: Objective
    settings: Training
    run: Run
    held_out: Iterable[Batch] = ()
    sample: Callable[[nn.Module], str] | None = None
    tokenizer: SavesFiles | None = None
    listener: Listener = field(default_factory=Listener)

    def train(self) -> TrainingResult:
        """Train, or go on training, until `settings.steps` or a signal. Seeds torch's global generator."""
        with self.run.locked():
            self.prepare()
            place = self.restore()
            self.listener.started(place.step, self.settings.steps)
            try:
                with Log(self.run.path, place.step) as log, stop_on_signals() as stop:
                    result = self.loop(place, log, stop)
            finally:
                self.listener.ended()
        if not result.finished:
            self.listener.note(
                f"stopped at step {result.step} and saved; to go on: regard train --resume {self.run.path}"
            )
        return result

    def loop(self, place: TrainingPosition, log: Log, stop: StopSignal) -> TrainingResult:
        steps, saved = self.settings.steps, place
        record, evaluation = {}, {}
        batches = iter(self.loader)
        while place.step < steps and not stop.asked:
            place, record = self.step(batches, place)
            log.write(record)
            self.listener.stepped(record)
            if due(self.settings.evaluate_every, place.step, steps):
                evaluation = self.evaluate(place, log)
            if due(self.settings.save_every, place.step, steps):
                saved = self.save(place, log)
        if saved != place:
            self.save(place, log)
        return TrainingResult(place.step, place.step >= steps, record, evaluation)

    def prepare(self) -> None:
        settings = self.settings
        torch.manual_seed(settings.seed)
        self.device = next(self.model.parameters()).device
        self.precision = autocast(settings.precision, self.device)
        self.optimizer = settings.optimizer.build(self.model, settings.lr)
        self.fast = compiled(self.model, self.device, self.listener.note) if settings.compile else self.model
        self.model.train()

    def step(self, batches: Iterator[Batch], place: TrainingPosition) -> tuple[TrainingPosition, dict[str, Any]]:
        """One step: the place after it, and its record."""
        start, settings = time.perf_counter(), self.settings
        batch = next(batches)
        tokens = int((batch.segments >= 0).sum())
        lr = settings.lr * settings.schedule.factor(place.step, settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        place = TrainingPosition(place.step + 1, place.tokens + tokens)
        batch = batch.to(self.device)
        try:
            values = take_step(
                self.fast, self.objective, batch, self.optimizer, settings.clip, settings.accumulate, self.precision
            )
        except NonFinite as fault:
            values = {"loss": None, "skipped": self.skip(place, fault)}
        seconds = time.perf_counter() - start
        record = {"step": place.step, **values, "lr": lr, "tokens": place.tokens}
        return place, record | {"seconds": seconds, "tokens_per_second": tokens / seconds}

    def skip(self, place: TrainingPosition, fault: NonFinite) -> str:
        """Obey the policy about a batch that gives no number."""
        what = f"step {place.step}, batch {place.step} of the loader: {fault}"
        if self.settings.nonfinite == "stop":
            remedy = "lower lr, look at the batch, or pass over it with nonfinite='skip'"
            raise NonFinite(f"{what}. The weights are those of step {place.step - 1}; to go on, {remedy}") from fault
        self.listener.note(f"{what}. The step is skipped, the weights stay")
        return str(fault)

    def evaluate(self, place: TrainingPosition, log: Log) -> dict[str, Any]:
        """Look at held-out batches and write a sample, leaving no trace in the generators."""
        record: dict[str, Any] = {"step": place.step}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            values = evaluate(self.fast, self.objective, self.held_out, self.precision)
            if values:
                record |= {f"held_out_{name}": value for name, value in values.items()}
                log.write(record)
                self.listener.evaluated(record)
            if self.sample is not None:
                self.model.eval()
                log.sample(place.step, self.sample(self.model))
                self.model.train()
        return record

    def save(self, place: TrainingPosition, log: Log) -> TrainingPosition:
        log.sync()
        with self.run.saving(place.step, self.settings.keep) as folder:
            write_state(folder, place, self.model, self.optimizer, self.loader, self.tokenizer)
        self.listener.saved(self.run.checkpoint(place.step))
        return place

    def restore(self) -> TrainingPosition:
        """The place to go on from: that of the newest whole checkpoint, or the beginning."""
        folder = self.run.latest(self.listener.note)
        place = load_state(folder, self.model, self.optimizer, self.loader) if folder else TrainingPosition()
        self.run.forget_after(place.step)
        return place


def due(every: int, step: int, steps: int) -> bool:
    return step == steps or every > 0 and step % every == 0
