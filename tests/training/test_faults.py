"""Steps that are not taken: NaN and spikes with the policies stop, skip and roll back."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard
from regard.objectives.next_token import next_token
from regard.objectives.preference import DPO
from regard.training.faults import MIN_LOSSES, FaultState, LossSpike, NonFinite
from regard.training.progress import Listener
from regard.training.recipe import Recipe
from regard.training.reference import reference_logprobs
from regard.training.run import Run
from regard.training.start import build_model
from tests.cli import pairs
from tests.training.test_loop import RecordingListener
from tests.training.tiny import SETTINGS, curve, outcome, trainer


class FaultyObjective:
    """The objective, whose loss is multiplied by `factor` for the batches with these numbers, counted from 1."""

    def __init__(self, *batches: int, factor: float = math.nan):
        self.batches, self.factor, self.seen = batches, factor, []

    def __call__(self, model, batch):
        loss, count, metrics = next_token(model, batch)
        if model.training:
            key = batch.tokens.sum().item(), batch.targets[:, -1].tolist()
            self.seen.append(key)
            if list(dict.fromkeys(map(str, self.seen))).index(str(key)) + 1 in self.batches:
                loss = loss * self.factor
        return loss, count, metrics


def test_training_that_stops_on_nan_saves_the_state_before_it(tmp_path: Path) -> None:
    trainer(tmp_path / "undisturbed").train()
    path = tmp_path / "nan"
    with pytest.raises(NonFinite, match=r"step 5, batch 5 .*The state of step 4 is saved; .*--train.nonfinite=skip"):
        trainer(path, objective=FaultyObjective(5)).train()
    assert [folder.name for folder in Run.open(path).checkpoints] == ["step-000004", "step-000003"]
    trainer(path).train()  # the batch is tried again, with the random numbers of an undisturbed run
    assert outcome(path) == outcome(tmp_path / "undisturbed")


def test_a_stop_after_a_scheduled_save_writes_no_second_checkpoint(tmp_path: Path) -> None:
    listener = RecordingListener()
    with pytest.raises(NonFinite):
        trainer(tmp_path, objective=FaultyObjective(4), listener=listener).train()
    assert [event for event in listener.events if event[0] == "saved"] == [("saved", "step-000003")]


def test_rolling_back_restores_the_checkpoint_and_skips_the_batches_since(tmp_path: Path) -> None:
    settings, listener = replace(SETTINGS, nonfinite="roll_back"), RecordingListener()
    objective = FaultyObjective(5)
    result = trainer(tmp_path, settings, objective=objective, listener=listener).train()
    assert result.finished and len(objective.seen) == 12  # batches 4 and 5 did not count
    lines = [line for line in curve(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 11))
    rolled_back = [line for line in curve(tmp_path) if "rolled_back" in line]
    assert [line["step"] for line in rolled_back] == [4] and "step 5, batch 5" in rolled_back[0]["rolled_back"]
    assert "Rolled back to step 3" in listener.notes[0]


def test_rolling_back_before_the_first_save_restores_the_start(tmp_path: Path) -> None:
    settings = replace(SETTINGS, nonfinite="roll_back")
    assert trainer(tmp_path, settings, objective=FaultyObjective(2)).train().finished
    assert [line["step"] for line in curve(tmp_path) if "rolled_back" in line] == [1]


def test_batches_after_a_roll_back_are_compared_with_the_first_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run reads more batches than it has steps, whose log-probabilities are not in its table."""
    tables, run, seen, compute = pairs.recipe("decoder, attention", "dpo", tmp_path), tmp_path / "run", [], DPO.__call__
    tables["train"] |= {"nonfinite": "roll_back", "lr": 1e-2}

    def faulty(self, model, batch):
        loss, count, metrics = compute(self, model, batch)
        if model.training:
            seen.append(batch)
            loss = loss * math.nan if len(seen) == 4 else loss
        return loss, count, metrics

    monkeypatch.setattr(DPO, "__call__", faulty)
    assert regard.train(tables, out=run, device="cpu").finished and len(seen) == 6
    first = build_model(Recipe.from_dict(Run.open(run).config))
    for batch in seen:
        assert torch.allclose(batch.reference, reference_logprobs(first, batch).double(), atol=1e-5)


def test_rolling_back_is_bounded(tmp_path: Path) -> None:
    settings = replace(SETTINGS, nonfinite="roll_back")
    with pytest.raises(NonFinite, match="Rolled back 3 times to one checkpoint"):
        trainer(tmp_path, settings, objective=FaultyObjective(*range(5, 99))).train()
    assert Run.open(tmp_path).latest().name == "step-000003"


class Crash(Exception):
    pass


@pytest.mark.parametrize("batches", [5, 8, 11])
def test_a_run_that_rolls_back_resumes_exactly(tmp_path: Path, batches: int) -> None:
    """Crashes before the fault, after the roll back, and after the next save."""
    settings = replace(SETTINGS, nonfinite="roll_back", spike=50.0)
    trainer(tmp_path / "undisturbed", settings, objective=FaultyObjective(6)).train()
    path, objective = tmp_path / "crashed", FaultyObjective(6)

    class CrashingListener(Listener):
        def stepped(self, record) -> None:
            if len(objective.seen) == batches:
                raise Crash

    with pytest.raises(Crash):
        trainer(path, settings, objective=objective, listener=CrashingListener()).train()
    trainer(path, settings, objective=objective).train()
    assert outcome(path) == outcome(tmp_path / "undisturbed")


def test_a_spike_is_far_above_the_median_of_the_last_losses() -> None:
    faults = FaultState(factor=3.0)
    for loss in [1.0] * (MIN_LOSSES - 1):
        faults.check(100.0)
        faults.add(loss)
    faults.add(9.0)  # one outlier does not move the median
    faults.check(2.9)
    with pytest.raises(LossSpike, match=r"the loss 3.1 is above 3 times the median 1 of the last 8 losses"):
        faults.check(3.1)
    restored = FaultState(factor=3.0)
    restored.load_state_dict(faults.state_dict())
    with pytest.raises(LossSpike):
        restored.check(3.1)
    FaultState(factor=0).check(1e9)


@pytest.mark.parametrize("policy", ["stop", "skip", "roll_back"])
def test_the_policies_apply_to_spikes(tmp_path: Path, policy: str) -> None:
    settings = replace(SETTINGS, spike=5.0, nonfinite=policy, steps=12)
    training = trainer(tmp_path, settings, objective=FaultyObjective(11, factor=1000.0))
    if policy == "stop":
        with pytest.raises(LossSpike, match="step 11, batch 11 .*times the median"):
            training.train()
        assert Run.open(tmp_path).latest().name == "step-000010"
        return
    assert training.train().finished
    losses = [line["loss"] for line in curve(tmp_path) if "loss" in line]
    assert len(losses) == 12 and losses.count(None) == (policy == "skip")
    assert max(loss for loss in losses if loss is not None) < 10
