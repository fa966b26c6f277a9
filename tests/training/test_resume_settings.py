"""Overrides on resume: allowed by name, recorded, applied by every later resume; a jump of the rate needs a flag."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from regard.checkpoint.atomic_folder import CheckpointError
from regard.spec import SpecError
from regard.training.recipe import Training
from regard.training.resume_settings import CHANGEABLE, check_extension, resumed_config
from regard.training.run import Run
from regard.training.run_identity import append_change, read_changes
from regard.training.schedule import Constant, Cosine, WarmupStableDecay
from tests.training.test_faults import Crash
from tests.training.test_loop import RecordingListener
from tests.training.tiny import SETTINGS, curve, outcome, trainer

WSD = WarmupStableDecay(warmup=2, decay=0.2)


def resume(path: Path, overrides: dict | None = None, extend: bool = False, **options) -> list[str]:
    """Resume as `regard train --resume` does; returns the notes."""
    listener = options.pop("listener", None) or RecordingListener()
    config, changes = resumed_config(Run.open(path), overrides or {}, extend, listener.note)
    trainer(path, Training.from_dict(config["train"]), listener=listener, overrides=changes, **options).train()
    return listener.notes


def crash() -> None:
    raise Crash


def test_overrides_are_applied_recorded_and_applied_again(tmp_path: Path) -> None:
    trainer(tmp_path, replace(SETTINGS, steps=4, schedule=Constant())).train()
    resume(tmp_path, {"train.steps": "8", "train.lr": "1e-4", "train.clip": "1.0"})
    assert read_changes(tmp_path) == [
        {"step": 4, "overrides": {"train.steps": 8, "train.lr": 1e-4}}
    ]  # clip is the same
    assert [line["lr"] for line in curve(tmp_path) if "lr" in line] == [3e-3] * 4 + [1e-4] * 4
    resume(tmp_path, {"train.steps": 10})
    assert [line["lr"] for line in curve(tmp_path) if "lr" in line] == [3e-3] * 4 + [1e-4] * 6
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 4  # the config is never rewritten


def test_a_changed_run_that_crashes_resumes_exactly(tmp_path: Path) -> None:
    start = replace(SETTINGS, steps=4, schedule=Constant())
    for name in ("undisturbed", "crashed"):
        trainer(tmp_path / name, start).train()
    changes = {"train.steps": 12, "train.lr": 1e-4, "train.save_every": 4}
    resume(tmp_path / "undisturbed", changes)
    for step in (5, 9):  # before and after the first checkpoint with the changes
        with pytest.raises(Crash):
            resume(tmp_path / "crashed", changes if step == 5 else {}, listener=RecordingListener(step, crash))
    resume(tmp_path / "crashed")
    assert outcome(tmp_path / "crashed") == outcome(tmp_path / "undisturbed")


def test_other_names_are_refused_with_the_list(tmp_path: Path) -> None:
    trainer(tmp_path, replace(SETTINGS, steps=4)).train()
    for name in ("train.seed", "model.width", "train.optimizer.beta1", "data.rows", "train.stepz"):
        with pytest.raises(SpecError, match=f"{name} cannot be changed.*train.steps, train.lr, .*start a new run"):
            resume(tmp_path, {name: 1})
    with pytest.raises(SpecError, match="steps"):
        resume(tmp_path, {"train.steps": "many"})
    assert read_changes(tmp_path) == [] and all(hasattr(SETTINGS, name.removeprefix("train.")) for name in CHANGEABLE)


def test_a_change_is_not_recorded_if_the_run_is_not_resumed(tmp_path: Path) -> None:
    trainer(tmp_path, replace(SETTINGS, steps=4, schedule=Constant())).train()
    with Run(tmp_path).locked(), pytest.raises(ValueError, match="another process is training"):
        resume(tmp_path, {"train.steps": 8})
    assert read_changes(tmp_path) == []


def test_an_extension_that_lets_the_rate_jump_needs_a_flag(tmp_path: Path) -> None:
    trainer(tmp_path, replace(SETTINGS, steps=4)).train()
    rates = r"from 0\.00165 to 0\.00233 at step 5"
    with pytest.raises(SpecError, match=rf"train.steps=8 extends a run of 4 steps.*would jump {rates}.*--extend"):
        resume(tmp_path, {"train.steps": 8})
    assert read_changes(tmp_path) == []
    notes = resume(tmp_path, {"train.steps": 8}, extend=True)
    assert "the run is extended to 8 steps" in notes[0] and "learning rate jumps from 0.00165 to 0.00233" in notes[0]
    assert curve(tmp_path)[-1]["step"] == 8
    resume(tmp_path)  # finished; the recorded extension needs no second flag


@pytest.mark.parametrize(
    ("schedule", "step", "steps", "jumps"),
    [
        (Constant(), 100, 200, False),
        (Constant(warmup=10), 5, 200, False),
        (Cosine(warmup=10), 100, 200, True),
        (Cosine(warmup=10), 50, 200, True),
        (Cosine(warmup=10), 5, 200, False),  # the warm-up does not depend on the number of steps
        (Cosine(warmup=10), 12, 200, False),  # the rate changes by less than a tenth
        (Cosine(warmup=10), 50, 60, False),  # not an extension
        (WSD, 100, 200, True),
        (WSD, 70, 200, False),  # the stable part
    ],
)
def test_which_extensions_jump(schedule, step: int, steps: int, jumps: bool) -> None:
    before = Training(steps=100, schedule=schedule)
    after = replace(before, steps=steps)
    assert (check_extension(before, after, step, extend=True) is not None) == jumps
    if jumps:
        with pytest.raises(SpecError, match="would jump"):
            check_extension(before, after, step, extend=False)


def test_damaged_and_lost_changes_are_detected(tmp_path: Path) -> None:
    path, rng = tmp_path / "run", random.Random(0)
    trainer(path, replace(SETTINGS, steps=4, schedule=Constant())).train()
    resume(path, {"train.lr": 1e-4, "train.steps": 6})
    append_change(path, {"step": 6, "overrides": {"train.lr": 1e-5}})
    content = (path / "changes.jsonl").read_bytes()
    for _ in range(100):
        data = bytearray(content)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (path / "changes.jsonl").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"changes\.jsonl, line \d is damaged"):
            resume(path)
    for first_line in (b"", content.splitlines(keepends=True)[1]):
        (path / "changes.jsonl").write_bytes(first_line)
        with pytest.raises(CheckpointError, match=r"changes\.jsonl does not contain all changes.*step-000006"):
            resume(path)
    (path / "changes.jsonl").write_bytes(content)
    resume(path, {"train.steps": 8})
    assert [line["lr"] for line in curve(path) if "lr" in line] == [3e-3] * 4 + [1e-4] * 2 + [1e-5] * 2
