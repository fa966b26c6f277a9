"""The run directory: its contents, the number of checkpoints, and damaged checkpoints."""

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from regard.checkpoint.atomic_folder import CheckpointError, check_folder
from regard.cli.open_model import open_model
from regard.models.decoder import Decoder
from regard.objectives.next_token import next_token
from regard.training.run import Run
from tests.training.tiny import SETTINGS, SPEC, TOKENIZER, curve, loader, outcome, trainer


def test_a_run_directory_holds_its_config_log_samples_and_checkpoints(tmp_path: Path) -> None:
    trainer(tmp_path, tokenizer=TOKENIZER).train()
    assert {p.name for p in tmp_path.iterdir()} >= {
        "run.json",
        "best.json",
        "config.json",
        "metrics.jsonl",
        "samples.txt",
        "checkpoints",
        "lock",
    }
    assert Run.open(tmp_path).config == {"train": SETTINGS.to_dict()}
    assert [folder.name for folder in Run.open(tmp_path).checkpoints] == ["step-000010", "step-000009"]
    newest = Run.open(tmp_path).latest()
    check_folder(newest)
    files = {"config.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors", "training.json"}
    assert {file.name for file in newest.iterdir()} >= files | {"manifest.json", "tokenizer.json"}
    config = json.loads((newest / "config.json").read_text())
    assert config["model_type"] == "regard" and Decoder.from_dict(config["spec"]) == SPEC
    steps = [line["step"] for line in curve(tmp_path) if "loss" in line]
    assert steps == list(range(1, 11))
    assert [line["step"] for line in curve(tmp_path) if "held_out_loss" in line] == [5, 10]
    assert (tmp_path / "samples.txt").read_text().startswith("step 5\n    a text")


def test_a_checksum_is_computed_once_per_save_and_once_per_load(tmp_path: Path, monkeypatch) -> None:
    checksummed, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: checksummed.append(file.name) or digest(file, kind))
    trainer(tmp_path, replace(SETTINGS, steps=1), tokenizer=TOKENIZER).train()
    files = [file.name for file in Run.open(tmp_path).checkpoint(1).iterdir() if file.name != "manifest.json"]
    assert sorted(Path(name).name for name in checksummed) == sorted(files)
    checksummed.clear()
    open_model(tmp_path, "cpu")
    assert sorted(Path(name).name for name in checksummed) == sorted(files)


def test_tensorboard_events_are_written_if_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer(tmp_path).train()
    assert list((tmp_path / "tensorboard").glob("events.*"))


class HeldOutLosses:
    """The objective with these held-out losses, one per evaluation of one batch."""

    def __init__(self, *losses: float):
        self.losses = list(losses)

    def __call__(self, model, batch):
        loss, count, metrics = next_token(model, batch)
        return (loss if model.training else count * self.losses.pop(0)), count, metrics


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    settings = replace(SETTINGS, save_every=2, evaluate_every=2, keep=1)
    objective = HeldOutLosses(3.0, 1.0, float("nan"), 2.0, 4.0)
    trainer(tmp_path, settings, objective=objective, held_out=[next(iter(loader("held-out")))]).train()
    assert [folder.name for folder in Run.open(tmp_path).checkpoints] == ["step-000010", "step-000004"]
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 4, "held_out_loss": 1.0}


def test_only_checkpoints_of_evaluated_steps_can_be_the_best(tmp_path: Path) -> None:
    settings = replace(SETTINGS, save_every=3, evaluate_every=5, keep=1)
    objective = HeldOutLosses(1.0, 2.0)
    trainer(tmp_path, settings, objective=objective, held_out=[next(iter(loader("held-out")))]).train()
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 10, "held_out_loss": 2.0}


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    trainer(tmp_path, replace(SETTINGS, keep=keep)).train()
    steps = [int(folder.name.removeprefix("step-")) for folder in Run.open(tmp_path).checkpoints]
    assert steps == [10, 9, 6][:keep]
    assert len(list((tmp_path / "checkpoints").iterdir())) == keep


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    Run.create(tmp_path, {})
    with pytest.raises(ValueError, match="already holds a run; resume it"):
        Run.create(tmp_path, {})
    with pytest.raises(ValueError, match="holds no run"):
        Run.open(tmp_path / "elsewhere")


def test_a_run_without_a_step_is_discarded_with_its_reference(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {})
    for name in ("reference.safetensors", "reference-1.safetensors"):
        (run.path / name).write_bytes(b"of another model")
    run.discard_unused()
    assert not run.path.exists()


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    trainer(tmp_path / "undisturbed").train()
    expected = outcome(tmp_path / "undisturbed")
    files = ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "training.json", "manifest.json"]
    for trial, name in enumerate(files):
        path, rng = tmp_path / name, random.Random(trial)
        trainer(path).train()
        file = path / "checkpoints" / "step-000010" / name
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        warnings = []
        assert Run.open(path).latest(warnings.append).name == "step-000009"
        assert len(warnings) == 1 and name in warnings[0]
        trainer(path).train()
        assert outcome(path) == expected
        assert (path / "checkpoints" / "step-000010.damaged" / name).exists()


def test_a_run_with_only_damaged_checkpoints_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    for folder in Run.open(tmp_path).checkpoints:
        (folder / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="all checkpoints .* are damaged"):
        trainer(tmp_path).train()
    assert curve(tmp_path)[-1]["step"] == 10
