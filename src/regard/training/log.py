"""The log of a run: metrics as JSON lines (and for TensorBoard, if it is installed), and samples.

A run that resumes from step n first removes all entries after step n, so that the log of an interrupted run equals that
of an undisturbed one. Damaged lines before that are removed with a note.
"""

import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from textwrap import indent
from typing import Any

from regard.checkpoint.atomic_folder import CheckpointError, sync_folder, write_file


class Log:
    """The log files in a run's directory, continued from `step`."""

    def __init__(self, path: Path, step: int = 0, note: Callable[[str], None] = print):
        self.path = path
        remove_damaged_lines(path / "metrics.jsonl", note)
        self.open(step)
        last = last_step(path / "metrics.jsonl")
        if last < step:
            note(f"{path / 'metrics.jsonl'} ends at step {last}; the entries of the steps up to {step} are lost")

    def open(self, step: int) -> None:
        truncate_after(self.path / "metrics.jsonl", step, step_of_metrics)
        truncate_after(self.path / "samples.txt", step, step_of_sample)
        self.metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        self.samples = (self.path / "samples.txt").open("a", encoding="utf-8")
        sync_folder(self.path)
        self.board = open_board(self.path / "tensorboard", step)

    def close(self) -> None:
        for stream in (self.metrics, self.samples, self.board):
            stream.close()

    def roll_back(self, step: int) -> None:
        """Remove all entries after a step."""
        self.close()
        self.open(step)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for stream in (self.metrics, self.samples, self.board):
            with nullcontext() if error is None else suppress(OSError):  # the first error is the one to report
                stream.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line, and its numbers to TensorBoard. NaN and infinity become null, because JSON has neither."""
        line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            self.metrics.write(json.dumps(line, allow_nan=False) + "\n")
            self.metrics.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self.path / 'metrics.jsonl'} could not be written ({error}); free disk space, then continue from "
                f"the last checkpoint: regard train --resume {self.path}"
            ) from error
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self.board.add_scalar(name, value, record["step"])

    def sample(self, step: int, text: str) -> None:
        self.samples.write(f"step {step}\n{indent(text, '    ')}\n\n")
        self.samples.flush()
        self.board.add_text("sample", text, step)

    def sync(self) -> None:
        """Flush to disk, so that a checkpoint is never newer than the log."""
        for stream in (self.metrics, self.samples):
            os.fsync(stream.fileno())


class NoBoard:
    """Used if TensorBoard is not installed."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        pass

    def add_text(self, name: str, text: str, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def open_board(path: Path, step: int):
    if importlib.util.find_spec("tensorboard") is None:
        return NoBoard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path), purge_step=step + 1)


def truncate_after(path: Path, step: int, step_of: Callable[[bytes], float | None]) -> None:
    """Truncate a file before its first line of a step after `step`."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as stream:
        for line in stream:
            if (step_of(line) or 0) > step:
                break
            end += len(line)
    os.truncate(path, end)


def remove_damaged_lines(path: Path, note: Callable[[str], None]) -> None:
    """Remove the complete lines that are not JSON objects with a step; an incomplete last line is left."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    damaged = [n for n, line in enumerate(lines, start=1) if line.endswith(b"\n") and not has_step(line)]
    if damaged:
        note(f"removing {len(damaged)} damaged lines from {path}, the first is line {damaged[0]}")
        write_file(path, b"".join(line for n, line in enumerate(lines, start=1) if n not in set(damaged)))


def last_step(path: Path) -> int:
    lines = path.read_bytes().splitlines()
    return json.loads(lines[-1])["step"] if lines else 0


def has_step(line: bytes) -> bool:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(step, int)


def step_of_metrics(line: bytes) -> float:
    """The step of a line; infinity for an incomplete line, which is later than every checkpoint."""
    return json.loads(line)["step"] if line.endswith(b"\n") and has_step(line) else float("inf")


def step_of_sample(line: bytes) -> int | None:
    header = re.fullmatch(rb"step (\d+)\n", line)
    return int(header[1]) if header else None
