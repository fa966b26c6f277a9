"""The log: resuming removes the entries after its step and no others."""

import json
from pathlib import Path

import pytest

from regard.checkpoint.atomic_folder import CheckpointError
from regard.training import log as logs
from regard.training.log import Log


def write(path: Path, first: int, last: int) -> None:
    with Log(path, first - 1) as log:
        for step in range(first, last + 1):
            log.write({"step": step, "loss": 1 / step})
            if step % 2 == 0:
                log.write({"step": step, "held_out_loss": 2 / step})
                log.sample(step, f"text of {step}\nstep 99\n")
        log.sync()


def log_files(path: Path) -> tuple[bytes, bytes]:
    return (path / "metrics.jsonl").read_bytes(), (path / "samples.txt").read_bytes()


@pytest.mark.parametrize("step", range(9))
def test_resuming_removes_later_entries(tmp_path: Path, step: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(tmp_path / "a", 1, 8)
    write(tmp_path / "b", 1, 8)
    write(tmp_path / "b", step + 1, 8)
    assert log_files(tmp_path / "a") == log_files(tmp_path / "b")


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 1, 4)
    metrics, _ = log_files(tmp_path)
    end_of_step_3 = len(b"".join(metrics.splitlines(keepends=True)[:-2]))  # step 4 has two lines
    for end in range(end_of_step_3, len(metrics)):
        (tmp_path / "metrics.jsonl").write_bytes(metrics[:end])
        with Log(tmp_path, 3):
            pass
        assert (tmp_path / "metrics.jsonl").read_bytes() == metrics[:end_of_step_3]


def test_numbers_round_trip_exactly(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.write({"step": 1, "loss": 0.1 + 0.2})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.1 + 0.2


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.write({"step": 1, "held_out_loss": float("nan"), "accuracy": float("inf")})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "held_out_loss": None, "accuracy": None}


def test_without_tensorboard_no_events_are_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(logs.importlib.util, "find_spec", lambda name: None)
    write(tmp_path, 1, 2)
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("line", [b'{"loss": 1.0}\n', b"[1]\n", b'{"step": null}\n', b"\xff\x00\n", b"{\n", b"\n"])
def test_a_damaged_line_is_removed_with_a_note(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, 1, 4)
    metrics, _ = log_files(tmp_path)
    lines = metrics.splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
    notes = []
    with Log(tmp_path, 4, notes.append):
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    assert len(notes) == 1 and "the first is line 3" in notes[0]


def test_lost_entries_are_noted(tmp_path: Path) -> None:
    write(tmp_path, 1, 4)
    (tmp_path / "metrics.jsonl").write_bytes((tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0])
    notes: list[str] = []
    Log(tmp_path, 4, notes.append).close()
    assert "ends at step 1; the entries of the steps up to 4 are lost" in notes[0]


def test_a_full_disk_is_reported_with_a_remedy(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    with pytest.raises(CheckpointError, match="metrics.jsonl could not be written.*--resume"), Log(tmp_path) as log:
        log.metrics.close()
        log.metrics = full.open("w")
        log.write({"step": 1, "loss": 1.0})
