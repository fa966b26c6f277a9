"""The training loop: one for every objective, model and device.

Each batch of the loader is one step (step.py). After a signal, a kill or a crash, training resumes from the newest
complete checkpoint: weights, moments, random generators and the loader's position are restored (resume_state.py), and
the log is truncated to that step (log.py). The steps that follow are bit-identical to those of an undisturbed run on
the same machine, thread count and torch. Checkpoints are written in the background (saver.py).
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.adapt.fp8 import use_fp8
from regard.checkpoint.model_folder import SavesFiles
from regard.data.batch import Batch
from regard.data.prefetch import StatefulLoader, prefetching
from regard.objectives.base import LossFunction, phase_of
from regard.training.activation_checkpointing import checkpoint_activations
from regard.training.ema import EMA, MovingAverage
from regard.training.faults import MAX_ROLL_BACKS, FaultState, StepFault
from regard.training.log import Log
from regard.training.monitor import gradient_norms, measure_activations
from regard.training.optimizer import optimizer_state, set_learning_rate
from regard.training.parallel.context_parallel import split_columns
from regard.training.parallel.distribute import check_settings, distribute, is_whole, split_groups
from regard.training.parallel.mesh import Processes
from regard.training.parallel.shared_run import NoLog
from regard.training.parallel.snapshot import copy_shared_weights, take_shared_snapshot
from regard.training.parameter_groups import freeze, frozen_except
from regard.training.progress import Listener, summarize
from regard.training.recipe import Training
from regard.training.resume_state import (
    InputState,
    TrainingPosition,
    copy_weights,
    load_state,
    take_snapshot,
)
from regard.training.run import Run, step_of
from regard.training.run_identity import append_change
from regard.training.saver import Saver
from regard.training.step import autocast, compile_model, cut_rows, evaluate, take_step
from regard.training.stop_signal import StopSignal, stop_on_signals


@dataclass(frozen=True)
class TrainingResult:
    step: int
    finished: bool  # False: stopped by a signal before the last step
    record: dict[str, Any]  # of the last step, as in metrics.jsonl; empty if no step was taken
    evaluation: dict[str, Any]  # the last evaluation, as in metrics.jsonl; empty if there was none

    @property
    def exit_code(self) -> int:
        return 0 if self.finished else 130


@dataclass
class Trainer:
    """A model, its data and its settings.

    held_out: the batches of every evaluation; sample: returns a generated text, which every evaluation logs;
    tokenizer: saved with the model; base: the folder of the model that adapters belong to;
    source_family: that of the initial weights (checkpoint/model_folder.py); with_head: the head is trained beside the
    adapter; overrides: settings that differ from those before this resume, recorded in the run; prefetch: the number of
    batches that a thread makes in advance, for a loader that depends on neither the model nor torch's random
    generators; None: 2 on a GPU, else 0;
    processes: those that train together, with a SharedRun and a loader of their own rows (parallel/);
    resumed_by: the command that resumes the run; None: regard train --resume.
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
    source_family: str | None = None
    with_head: bool = False
    listener: Listener = field(default_factory=Listener)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    prefetch: int | None = 0
    processes: Processes = field(default_factory=Processes)
    resumed_by: str | None = None

    def train(self) -> TrainingResult:
        """Start or resume, and train until `settings.steps` or a signal. Seeds torch's global generator."""
        with self.run.locked():
            self.run.check_files()
            self.prepare()
            position = self.restore()
            if position.step >= self.settings.steps and self.overrides and "train.steps" not in self.overrides:
                raise ValueError(
                    f"{self.run.path} is finished at step {position.step}, so {', '.join(self.overrides)} would change "
                    f"nothing; to train longer, add --train.steps={2 * position.step} --extend"
                )
            if self.overrides and self.processes.is_main:
                append_change(self.run.path, {"step": position.step, "overrides": dict(self.overrides)})
            self.processes.wait_for_all()
            self.stamp = self.run.stamp()
            if position.step >= self.settings.steps:
                longer = f"regard train --resume {self.run.path} --train.steps={2 * position.step} --extend"
                self.listener.note(
                    f"{self.run.path} is already finished at step {position.step}; nothing to train."
                    + (f" To train longer: {longer}" if self.resumed_by is None else "")
                )
            else:
                self.listener.summary(summarize(self.model, self.loader, self.settings, self.device))
            self.listener.started(position.step, self.settings.steps)
            try:
                with (
                    self.open_log(position.step) as log,
                    stop_on_signals() as stop,
                    self.saver,
                    prefetching(self.loader, self.prefetch_depth, self.device.type == "cuda") as self.input,
                ):
                    result = self.loop(position, log, stop)
            finally:
                self.listener.ended()
        if not result.finished:
            command = self.resumed_by or f"regard train --resume {self.run.path}"
            self.listener.note(f"stopped at step {result.step} and saved; to resume: {command}")
        return result

    def loop(self, position: TrainingPosition, log: Log | NoLog, stop: StopSignal) -> TrainingResult:
        steps, self.evaluation = self.settings.steps, {}
        record: dict[str, Any] = {}
        batches = iter(self.input)
        if self.settings.nonfinite == "roll_back" and not self.run.checkpoints:
            self.save(position, log)
        while position.step < steps and not self.processes.any_has(stop.requested):
            self.saver.poll()
            input_state = InputState.now(self.input)
            start = time.perf_counter()
            try:
                batch = next(batches)
            except (ValueError, OSError):  # a file was changed or deleted, or a line is not valid
                if position.step and self.saved_step != position.step and self.processes.mesh is None:
                    self.save(position, log, input_state)
                    self.saver.wait()
                    self.listener.note(f"the state of step {position.step} is saved in {self.run.path}")
                raise
            try:
                position, record = self.step(batch, position, start)
            except StepFault as fault:
                position = self.roll_back(fault, position, log, input_state)
                continue
            log.write(record)
            self.listener.stepped(record)
            if is_due(self.settings.evaluate_every, position.step, steps):
                self.evaluation = self.evaluate(position, log)
            if is_due(self.settings.save_every, position.step, steps):
                self.faults.roll_backs = 0
                self.save(position, log)
        if self.saved_step != position.step:
            self.save(position, log)
        self.saver.wait()
        if position.step >= steps and self.ema.average:
            with self.ema.applied():
                write_average = self.copy_weights()
            with self.run.writing(EMA) as folder:
                write_average(folder)
        return TrainingResult(position.step, position.step >= steps, record, self.evaluation)

    @property
    def prefetch_depth(self) -> int:
        """On a CPU a thread that makes batches competes with the model for cores."""
        return (0 if self.device.type == "cpu" else 2) if self.prefetch is None else self.prefetch

    def prepare(self) -> None:
        settings = self.settings
        torch.manual_seed(settings.seed + self.processes.random_stream)
        self.device = next(self.model.parameters()).device
        self.precision = autocast(settings.precision, self.device)
        check_settings(settings, getattr(self.objective, "scope", "token"), self.processes)
        freeze(self.model, settings.freeze)
        if settings.precision == "fp8":
            use_fp8(self.model)
        checkpoint_activations(self.model, settings.checkpoint_activations)
        self.forward_model, self.reduction = distribute(self.model, self.processes)
        self.optimizer = settings.build_optimizer(self.model)
        if self.processes.mesh is not None:
            split_groups(self.optimizer)
        self.ema = MovingAverage(self.model, settings.ema)
        if settings.compile:
            self.forward_model = compile_model(self.forward_model, self.device, self.listener.note)
        self.faults = FaultState(settings.spike)
        agree = self.processes.all_agree
        self.saver = Saver(self.run, settings.keep, settings.async_save, self.listener.saved, agree)
        self.model.train()

    def step(self, batch: Batch, position: TrainingPosition, start: float) -> tuple[TrainingPosition, dict[str, Any]]:
        """One step; returns the position after it, and its record. A fault that is not skipped is raised.

        start: the time before the batch was read.
        """
        settings = self.settings
        batch = cut_rows(batch, settings.row_parts(position.step))
        tokens = self.processes.sum_rows(batch.token_count)
        lr = settings.lr * settings.schedule.factor(position.step, settings.steps)
        set_learning_rate(self.optimizer, lr)
        phase = phase_of(self.objective, position.step)
        position = TrainingPosition(position.step + 1, position.tokens + tokens, position.batches + 1)
        batch = split_columns(batch, self.processes).to(self.device, non_blocking=True)
        self.monitored = settings.monitor_every > 0 and position.step % settings.monitor_every == 0
        measured = self.measure(batch) if self.monitored else {}
        try:
            with frozen_except(self.optimizer, phase.trains):
                values = take_step(
                    self.forward_model, phase.loss, batch, self.optimizer,
                    settings.clip, settings.accumulate, self.precision, self.before_update, self.reduction,
                )  # fmt: skip
            self.ema.update()
        except StepFault as fault:
            if settings.nonfinite != "skip":
                raise
            self.listener.note(f"{describe(fault, position)}. The step is skipped, the weights are unchanged")
            values = {"loss": None, "skipped": str(fault)}
        seconds = time.perf_counter() - start
        record = {"step": position.step, **values, **measured, "lr": lr, "tokens": position.tokens}
        return position, record | {"seconds": seconds, "tokens_per_second": tokens / seconds}

    def before_update(self, values: dict[str, float], count: float) -> None:
        self.faults.check(values["loss"])
        self.faults.add(values["loss"])
        if self.monitored:
            values |= gradient_norms(self.model, count, self.reduction)

    def measure(self, batch: Batch) -> dict[str, float]:
        return measure_activations(self.model, self.objective, batch, self.precision, self.processes)

    def roll_back(
        self, fault: StepFault, position: TrainingPosition, log: Log | NoLog, input_state: InputState
    ) -> TrainingPosition:
        """Restore the last scheduled checkpoint; the loader goes on after the batch with the fault.

        With the policy "stop", or after too many attempts, the state before the fault is saved and the fault raised.
        """
        self.saver.wait()
        reason = describe(fault, replace(position, step=position.step + 1, batches=position.batches + 1))
        if self.settings.nonfinite == "stop" or self.faults.roll_backs == MAX_ROLL_BACKS:
            if self.saved_step != position.step:
                self.save(position, log, input_state)
                self.saver.wait()
            attempts = f"Rolled back {MAX_ROLL_BACKS} times to one checkpoint. " if self.faults.roll_backs else ""
            raise type(fault)(
                f"{reason}. {attempts}The state of step {position.step} is saved; to continue, lower train.lr or skip "
                f"the batch: regard train --resume {self.run.path} --train.nonfinite=skip"
            ) from fault
        scheduled = [f for f in self.run.checkpoints if is_due(self.settings.save_every, step_of(f), 0)]
        folder = self.run.latest(self.listener.note, scheduled or self.run.checkpoints)
        assert folder is not None, "a run with this policy has a checkpoint from its start"
        roll_backs, saved = self.faults.roll_backs + 1, self.load(folder)
        self.faults.load_state_dict(saved["faults"] | {"roll_backs": roll_backs})
        self.ema.average = {}
        self.ema.load(folder)
        self.saved_step = saved["step"]
        self.run.delete_after(saved["step"])
        log.roll_back(saved["step"])
        log.write({"step": saved["step"] + 1, "rolled_back": reason})
        self.listener.note(f"{reason}. Rolled back to step {saved['step']}; the batches since then are not used again")
        return TrainingPosition(saved["step"], saved["tokens"], position.batches + 1)

    def evaluate(self, position: TrainingPosition, log: Log | NoLog) -> dict[str, Any]:
        """Evaluate the held-out batches and log a sample; the random generators are left unchanged."""
        record: dict[str, Any] = {"step": position.step}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), self.ema.applied():
            held_out = (split_columns(batch, self.processes) for batch in self.held_out)
            values = evaluate(self.forward_model, self.objective, held_out, self.precision, self.reduction)
            if values:
                record |= {f"held_out_{name}": value for name, value in values.items()}
                log.write(record)
                self.listener.evaluated(record)
            if self.sample is not None and self.processes.is_main and is_whole(self.processes):
                self.model.eval()
                log.sample(position.step, self.sample(self.model))
                self.model.train()
        return record

    def save(self, position: TrainingPosition, log: Log | NoLog, input_state: InputState | None = None) -> None:
        """Save the state; `input_state` is by default the present one."""
        current = self.evaluation if self.evaluation.get("step") == position.step else {}
        loss = current.get("held_out_loss", math.nan)
        details = {
            "held_out_loss": loss if math.isfinite(loss) else None,
            "faults": self.faults.state_dict(),
            **self.stamp,
        }
        input_state = input_state or InputState.now(self.input)
        states = {"optimizer": optimizer_state(self.optimizer)}
        states |= {EMA: self.ema.average} if self.ema.average else {}
        parts = (position, self.copy_weights(), states, input_state, details)
        mesh = self.processes.mesh
        snapshot = take_snapshot(*parts) if mesh is None else take_shared_snapshot(*parts, self.processes)
        self.saver.save(snapshot, log.sync)
        self.saved_step = position.step

    def copy_weights(self) -> Callable[[Path], None]:
        parts = (self.model, self.tokenizer, self.base, self.source_family, self.with_head)
        return copy_weights(*parts) if self.processes.mesh is None else copy_shared_weights(*parts, self.processes)

    def load(self, folder: Path) -> dict[str, Any]:
        return load_state(folder, self.model, self.optimizer, self.processes.rank, self.processes.count)

    def open_log(self, step: int) -> Log | NoLog:
        return Log(self.run.path, step, self.listener.note) if self.processes.is_main else NoLog()

    def restore(self) -> TrainingPosition:
        """Load the newest complete checkpoint; returns its position, or the start if there is none."""
        self.saved_step, position = None, TrainingPosition()
        folder = self.run.latest(self.listener.note)
        if folder is not None:
            self.run.check_changes(folder)
            saved = self.load(folder)
            self.ema.load(folder)
            self.loader.load_state_dict(saved["loader"])
            self.faults.load_state_dict(saved["faults"])
            position = TrainingPosition(saved["step"], saved["tokens"], saved["batches"])
            self.saved_step = position.step
        self.run.discard_after(position.step)
        return position


def describe(fault: StepFault, position: TrainingPosition) -> str:
    return f"step {position.step}, batch {position.batches} of the loader: {fault}"


def is_due(every: int, step: int, steps: int) -> bool:
    return step == steps or every > 0 and step % every == 0
