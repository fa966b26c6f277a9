"""The folder of runs that a server shows: list, metrics, samples, and the demo, which can be started and stopped.

A run is named by its path below the folder. A name that leads out of it, also by a symbolic link, is refused.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.cli.demo_process import PROCESS, DemoProcesses, last_lines
from regard.cli.runs import with_parameters
from regard.training.run_metrics import read_metrics, read_samples
from regard.training.run_summary import RunSummary, find_runs, is_locked, is_run, summarize_run

NEW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
READ_FILES = ("config.json", "changes.jsonl", "metrics.jsonl", "samples.txt", "summary.json")


class ServedRuns:
    """The runs below `folder`, which need not exist yet. Methods raise LookupError for a run that is not there, and
    ValueError for what cannot be done."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, DemoProcesses()
        self._summaries: dict[Path, tuple[tuple, RunSummary]] = {}

    def listing(self) -> dict[str, Any]:
        """All runs, and the process of a demo that was started here and has not written a run yet, or failed before."""
        paths = self.paths()
        runs = [self.describe(path) for path in paths]
        return {"folder": readable(self.folder.name), "runs": runs, "process": self.process(set(paths))}

    def paths(self) -> list[Path]:
        """Without those whose names are not UTF-8: no request could name them."""
        root = self.folder.resolve()
        found = find_runs([self.folder]) if self.folder.is_dir() else []
        return [path for path in found if is_inside(path, root) and readable(name := self.name_of(path)) == name]

    def describe(self, path: Path) -> dict[str, Any]:
        summary = self.summarize(path).to_dict()
        data = {name: readable(value) for name, value in summary.items()} | {"run": self.name_of(path)}
        pid = self.processes.pid(path)
        return data | {
            "started": (path / "config.json").stat().st_mtime if (path / "config.json").exists() else None,
            "is_demo": self.is_demo(path),
            "exact_match": exact_match(path),
            "stage": self.stage(path, str(data["state"]), pid),
            "can_stop": pid is not None,
        }

    def summarize(self, path: Path) -> RunSummary:
        """The summary of a run, which is read again only if its files have changed."""
        state = (is_locked(path), *map(file_version, (path / name for name in (*READ_FILES, "checkpoints"))))
        known = self._summaries.get(path)
        if known is None or known[0] != state:
            self._summaries[path] = known = (state, with_parameters(summarize_run(path)))
        return known[1]

    def stage(self, path: Path, state: str, pid: int | None) -> str:
        """What a run does now: its state, or starting, stopping or answering (its test, after training)."""
        if pid is not None and self.processes.is_stopping(path):
            return "stopping"
        if pid is None or state == "running":
            return state
        return "answering" if state == "finished" else "starting"

    def process(self, runs: set[Path]) -> dict[str, Any] | None:
        """The newest process that was started here in a folder that is not a run."""
        files = sorted(self.folder.glob(f"*/{PROCESS}"), key=lambda file: file.stat().st_mtime)
        folders = [file.parent for file in files if file.parent not in runs and not is_run(file.parent)]
        if not folders:
            return None
        pid = self.processes.pid(folders[-1])
        stage = "failed" if pid is None else "stopping" if self.processes.is_stopping(folders[-1]) else "starting"
        return {"run": folders[-1].name, "stage": stage, "output": last_lines(folders[-1])}

    def metrics(
        self, name: str, cursor: str | None = None, columns: Sequence[str] | None = None, points: int = 1000
    ) -> dict[str, Any]:
        """The curves of a run after a cursor."""
        return asdict(read_metrics(self.find(name) / "metrics.jsonl", cursor, columns, points))

    def samples(self, name: str) -> Sequence[Mapping[str, Any]]:
        return [{"step": step, "text": text} for step, text in read_samples(self.find(name) / "samples.txt")]

    def find(self, name: str) -> Path:
        """The run of this name."""
        missing = LookupError(f"there is no run {name!r:.100} on this server; GET /regard/runs lists them")
        root = self.folder.resolve()
        try:
            path = self.folder / name
            if ".." in Path(name).parts or not is_inside(path, root) or path.resolve() == root or not is_run(path):
                raise missing
        except (OSError, ValueError, RuntimeError):  # a name with a null byte, or too long; a symlink loop
            raise missing from None
        return path

    def start(self, name: str, steps: int | None = None) -> None:
        """Start the demo in this folder, or continue it if it was stopped."""
        if not NEW_NAME.fullmatch(name):
            raise ValueError(f"the name {name!r:.100} has other characters than letters, digits, '.', '_' and '-'")
        path = self.folder / name
        if path.is_symlink() or path.exists() and not path.is_dir():
            raise ValueError(f"{name} is not a folder; choose another name")
        if running := next((run for run in self.candidates() if self.processes.pid(run) is not None), None):
            raise ValueError(f"the demo runs in {running.name}; stop it, or wait until it ends")
        if is_run(path) and not self.is_demo(path):
            raise ValueError(f"{name} holds a run that the demo did not train; choose another name")
        if is_locked(path):
            raise ValueError(f"another process trains in {name}; wait until it ends")
        if (path / "summary.json").exists():
            raise ValueError(f"{name} is trained already; choose another name, or remove its folder to train it again")
        try:
            self.processes.start(path, None if is_run(path) else steps)
        except BlockingIOError:
            raise ValueError(f"another process trains in {name}; wait until it ends") from None

    def stop(self, name: str) -> None:
        """Let the demo that was started here save its state and end."""
        path = self.folder / name
        if not NEW_NAME.fullmatch(name) or not self.processes.stop(path):
            raise LookupError(f"no demo that was started by a server runs in {name!r:.100}")

    def candidates(self) -> Sequence[Path]:
        return [file.parent for file in self.folder.glob(f"*/{PROCESS}")]

    def is_demo(self, path: Path) -> bool:
        """Whether `regard demo` trains this run: on the small world, without a start model."""
        summary = self.summarize(path)
        return summary.data == "world" and "from" not in summary.config and path.parent == self.folder

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix() if path != self.folder else path.resolve().name


def is_inside(path: Path, root: Path) -> bool:
    """Whether a run and the files that are read of it are below `root`."""
    resolved = [path.resolve(), *((path / name).resolve() for name in READ_FILES)]
    return all(each.is_relative_to(root) for each in resolved)


def readable(value: Any) -> Any:
    """A string, or a list of them, with '?' for unpaired surrogates, which JSON files may have and UTF-8 has not."""
    if isinstance(value, list):
        return [readable(item) for item in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def file_version(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def exact_match(path: Path) -> float | None:
    """The share of questions that a finished demo answers."""
    try:
        value = json.loads((path / "summary.json").read_text(encoding="utf-8"))["exact_match"]
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
