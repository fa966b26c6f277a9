"""The training loop: learning, evaluation, skipped batches, signals, adapters."""

import math
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.adapt import LoRA, add_lora
from regard.checkpoint import CheckpointError, load
from regard.objectives.next_token import next_token
from regard.training.progress import Listener
from regard.training.run import Run
from regard.training.step import NonFinite, evaluate
from tests.training.tiny import SETTINGS, SPEC, curve, outcome, trainer


class RecordingListener(Listener):
    """Records events and notes, and calls `action` after step `at`."""

    def __init__(self, at: int = 0, action=lambda: None):
        self.at, self.action, self.notes, self.events = at, action, [], []

    def started(self, step: int, steps: int) -> None:
        self.events.append(("started", step))

    def stepped(self, record: Mapping[str, Any]) -> None:
        if record["step"] == self.at:
            self.action()

    def saved(self, folder: Path) -> None:
        self.events.append(("saved", folder.name))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ended(self) -> None:
        self.events.append(("ended", 0))


def test_the_loss_falls_and_the_listener_is_called(tmp_path: Path) -> None:
    listener = RecordingListener()
    result = trainer(tmp_path, replace(SETTINGS, steps=40, save_every=25), listener=listener).train()
    losses = [line["loss"] for line in curve(tmp_path) if "loss" in line]
    assert len(losses) == 40 and losses[-1] < 0.85 * losses[0]
    assert (result.step, result.finished, result.exit_code) == (40, True, 0)
    assert result.record["loss"] == losses[-1]
    assert listener.events == [("started", 0), ("saved", "step-000025"), ("saved", "step-000040"), ("ended", 0)]
    model = load(tmp_path / "checkpoints" / "step-000040")
    held_out = trainer(tmp_path).held_out
    assert evaluate(model, next_token, held_out)["loss"] == pytest.approx(result.evaluation["held_out_loss"], rel=1e-6)


@pytest.mark.ledger("tr.ntp")
def test_accumulation_does_not_change_the_curve(tmp_path: Path) -> None:
    spec = replace(SPEC, layers=tuple(without_dropout(run) for run in SPEC.layers))
    curves = []
    for parts in (1, 2, 4):
        settings = replace(SETTINGS, accumulate=parts)
        trainer(tmp_path / str(parts), settings, model=spec.build(0).double()).train()
        curves.append([line["loss"] for line in curve(tmp_path / str(parts)) if "loss" in line])
    assert curves[1] == pytest.approx(curves[0], abs=1e-12)
    assert curves[2] == pytest.approx(curves[0], abs=1e-12)


def without_dropout(run):
    return replace(run, blocks=tuple(replace(block, dropout=0.0) for block in run.blocks))


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    trainer(tmp_path / "often", replace(SETTINGS, evaluate_every=1)).train()
    trainer(tmp_path / "never", replace(SETTINGS, evaluate_every=0), held_out=(), sample=None).train()
    often, never = outcome(tmp_path / "often"), outcome(tmp_path / "never")
    assert [line for line in often["curve"] if "loss" in line] == never["curve"]
    assert often["last"]["training"].pop("held_out_loss") and not never["last"]["training"].pop("held_out_loss")
    assert often["last"] == never["last"]
    assert often["samples"].count("\nstep ") == 9


def test_runs_with_the_same_seed_are_identical(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        trainer(tmp_path / name, replace(SETTINGS, seed=seed), model=SPEC.build(0)).train()
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    assert curve(tmp_path / "a") != curve(tmp_path / "c")  # only dropout differs


def nan_objective(at: int):
    """The objective, whose loss is NaN in training step `at`."""
    calls = []

    def objective(model, batch):
        loss, count, metrics = next_token(model, batch)
        calls.append(model.training)
        return loss * (math.nan if sum(calls) == at and model.training else 1), count, metrics

    return objective


def test_a_batch_that_is_not_finite_stops_training_and_is_reported(tmp_path: Path) -> None:
    training = trainer(tmp_path, objective=nan_objective(at=5))
    weights = {}

    def record_weights() -> None:
        weights.update({name: tensor.clone() for name, tensor in training.model.state_dict().items()})

    training.listener = RecordingListener(at=4, action=record_weights)
    with pytest.raises(NonFinite, match=r"step 5, batch 5 of the loader: the loss of rows 0 to 3 is nan.*skip"):
        training.train()
    assert all(torch.equal(weights[name], tensor) for name, tensor in training.model.state_dict().items())
    assert training.listener.events[-1] == ("ended", 0)
    assert [line["step"] for line in curve(tmp_path)] == [1, 2, 3, 4]
    trainer(tmp_path).train()  # from the last checkpoint, with a finite loss
    assert curve(tmp_path)[-1]["step"] == 10


def test_a_batch_that_is_not_finite_can_be_skipped(tmp_path: Path) -> None:
    listener = RecordingListener()
    settings = replace(SETTINGS, nonfinite="skip")
    result = trainer(tmp_path, settings, objective=nan_objective(at=5), listener=listener).train()
    assert result.finished
    lines = [line for line in curve(tmp_path) if "lr" in line]
    assert lines[4]["loss"] is None and "nan" in lines[4]["skipped"]
    assert all(line["loss"] is not None for line in lines[:4] + lines[5:])
    assert ["step 5, batch 5" in note for note in listener.notes] == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_training_after_the_step(tmp_path: Path, number: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    listener = RecordingListener(at=4, action=lambda: os.kill(os.getpid(), number))
    result = trainer(tmp_path, listener=listener).train()
    assert (result.step, result.finished, result.exit_code) == (4, False, 130)
    assert listener.events[-2:] == [("saved", "step-000004"), ("ended", 0)]
    assert f"regard train --resume {tmp_path}" in listener.notes[-1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_second_signal_aborts(tmp_path: Path) -> None:
    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, listener=RecordingListener(at=4, action=interrupt_twice)).train()
    assert [folder.name for folder in Run.open(tmp_path).checkpoints] == ["step-000003"]


def test_training_works_in_another_thread(tmp_path: Path) -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer(tmp_path).train()))
    thread.start()
    thread.join()
    assert results[0].finished


def test_only_one_process_trains_in_a_directory(tmp_path: Path) -> None:
    training = trainer(tmp_path)
    with Run.open(tmp_path).locked(), pytest.raises(ValueError, match="another process is training"):
        training.train()
    assert training.train().finished


def test_a_finished_run_is_not_changed(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    before = outcome(tmp_path)
    result = trainer(tmp_path).train()
    assert result.finished and result.record == {}
    assert outcome(tmp_path) == before


DROPOUT = LoRA(rank=2, dropout=0.1)


def adapted_model(lora: LoRA = DROPOUT) -> torch.nn.Module:
    model = SPEC.build(0)
    add_lora(model, lora, seed=1)
    return model


@pytest.mark.parametrize("lora", [DROPOUT, LoRA(2, 4.0, ("q_proj", "v_proj"), 0.1, True, True, "pissa_niter_2")])
def test_only_adapters_are_trained_and_resumed_exactly(tmp_path: Path, lora: LoRA) -> None:
    trainer(tmp_path / "undisturbed", model=adapted_model(lora)).train()
    trainer(
        tmp_path / "stopped",
        model=adapted_model(lora),
        listener=RecordingListener(at=4, action=lambda: signal.raise_signal(2)),
    ).train()
    restored = adapted_model(lora)
    with torch.no_grad():  # the checkpoint has the matrices that PiSSA started from
        for name, parameter in restored.named_parameters():
            if "lora_" in name:
                parameter.zero_()
    trained = trainer(tmp_path / "stopped", model=restored)
    trained.train()
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "undisturbed")
    initial = dict(adapted_model(lora).named_parameters())
    changed = {name for name, p in trained.model.named_parameters() if not torch.equal(p, initial[name])}
    assert changed == {name for name in initial if "lora_" in name and "lora_init_" not in name}


def test_resuming_with_another_model_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    other = replace(SPEC, layers=SPEC.layers[:1]).build(0)
    for model in (other, adapted_model(), replace(SPEC, context=99).build(0)):
        with pytest.raises(CheckpointError, match="another model"):
            trainer(tmp_path, model=model).train()
