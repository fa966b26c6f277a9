"""Checkpoints that are written in the background: the same bytes, errors are reported, a full disk does no damage."""

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from regard.checkpoint.atomic_folder import CheckpointError, check_folder
from regard.training import resume_state
from regard.training.optimizer import optimizer_state
from regard.training.resume_state import InputState, TrainingPosition, TrainingSnapshot, copy_weights, take_snapshot
from regard.training.run import Run
from tests.training.killing import exit_code
from tests.training.tiny import SETTINGS, curve, outcome, trainer


def test_a_save_in_the_background_gives_the_same_run(tmp_path: Path) -> None:
    for name, background in (("foreground", False), ("background", True)):
        trainer(tmp_path / name, replace(SETTINGS, async_save=background)).train()
    assert outcome(tmp_path / "foreground") == outcome(tmp_path / "background")


def test_a_snapshot_does_not_change_with_the_model(tmp_path: Path) -> None:
    training = trainer(tmp_path / "run")
    training.prepare()
    next(iter(training.loader))
    state = InputState.now(training.loader)
    states = {"optimizer": optimizer_state(training.optimizer)}
    snapshot = take_snapshot(TrainingPosition(3), copy_weights(training.model), states, state, {})
    for folder in (tmp_path / "before", tmp_path / "after"):
        folder.mkdir()
        snapshot.write(folder)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.add_(1)
        next(iter(training.loader))
        torch.rand(5)
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()


def test_steps_continue_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch) -> None:
    write, written, threads = TrainingSnapshot.write, threading.Event(), []

    def wait_for_a_step(snapshot: TrainingSnapshot, folder: Path) -> None:
        threads.append(threading.current_thread())
        if snapshot.step == 3:  # step 4 is taken meanwhile, or this would time out
            assert written.wait(timeout=60)
        write(snapshot, folder)

    monkeypatch.setattr(TrainingSnapshot, "write", wait_for_a_step)
    training = trainer(tmp_path)
    training.listener.stepped = lambda record: written.set() if record["step"] == 5 else None
    assert training.train().finished
    assert threading.main_thread() not in threads
    check_folder(tmp_path / "checkpoints" / "step-000009")


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("error", FULL, ids=["OSError", "SafetensorError"])
def test_a_full_disk_stops_training_and_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch, error: Exception, background: bool
) -> None:
    trainer(tmp_path / "undisturbed").train()
    save_file, calls = resume_state.save_file, []

    def fail(tensors, path):
        calls.append(path)
        save_file(tensors, path)
        if "step-000006" in str(path):
            raise error

    monkeypatch.setattr(resume_state, "save_file", fail)
    path = tmp_path / "full"
    with pytest.raises(CheckpointError, match=r"step 6 could not be written .*No space left.*free disk space"):
        trainer(path, replace(SETTINGS, async_save=background)).train()
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["step-000003"]
    monkeypatch.undo()
    trainer(path).train()
    assert outcome(path) == outcome(tmp_path / "undisturbed")


def test_a_failed_save_at_the_end_is_reported(tmp_path: Path, monkeypatch) -> None:
    def fail(tensors, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(resume_state, "save_file", fail)
    with pytest.raises(CheckpointError, match="step 10 could not be written"):
        trainer(tmp_path, replace(SETTINGS, save_every=0)).train()
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_real_limit_of_file_sizes_gives_one_line_and_no_partial_files(tmp_path: Path) -> None:
    """The write fails in the operating system, as on a full disk."""
    assert exit_code(tmp_path, "small files") == 1
    assert "the checkpoint of step 3 could not be written" in (tmp_path / "error").read_text()
    assert not list((tmp_path / "checkpoints").iterdir())
    trainer(tmp_path).train()  # from the start, because no checkpoint was written
    assert curve(tmp_path)[-1]["step"] == 10 and Run(tmp_path).latest() is not None
