"""Runs as `regard runs` lists them: state, model, data, progress and losses of a run, read from its directory.

A run in progress, a directory without checkpoints or a damaged log is read as far as possible; `problems` lists the
faults. The module does not import torch, so that listing many runs is quick.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from regard.training.history import History, complete_lines, read_history

RunState = Literal["finished", "stopped", "running", "damaged"]
DEPTH = 3  # levels of folders that are searched for runs: the trials of a sweep are below the sweep's folder


@dataclass(frozen=True)
class RunSummary:
    """One run, as `regard runs` lists it."""

    path: Path
    state: RunState
    config: Mapping[str, Any]
    history: History
    parameters: int | None  # saved in the newest checkpoint
    changed: float  # seconds since 1970
    problems: tuple[str, ...]

    @property
    def steps(self) -> int | None:
        return table(self.config, "train").get("steps")

    @property
    def kind(self) -> str:
        return str(table(self.config, "model").get("kind", self.config.get("from", "decoder")))

    @property
    def objective(self) -> str:
        return str(table(self.config, "objective").get("kind", "next_token"))

    @property
    def data(self) -> str:
        return ", ".join(data_names(table(self.config, "data"))) or "?"

    def to_dict(self) -> dict[str, Any]:
        best, last = self.history.best, self.history.evaluations[-1:]
        return {
            "run": str(self.path),
            "state": self.state,
            "model": self.kind,
            "parameters": self.parameters,
            "objective": self.objective,
            "data": self.data,
            "step": self.history.step,
            "steps": self.steps,
            "tokens": self.history.tokens,
            "loss": self.history.loss,
            "held_out_loss": last[0].loss if last else None,
            "best_held_out_loss": best.loss if best else None,
            "best_step": best.step if best else None,
            "tokens_per_second": self.history.tokens_per_second,
            "changed": self.changed,
            "problems": list(self.problems),
        }


def table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def data_names(data: Mapping[str, Any]) -> Iterator[str]:
    """The sources of a recipe's data: their paths, or their kinds where there is no path."""
    sources = data.get("sources", data.get("source"))
    for source in sources if isinstance(sources, list) else [sources]:
        values = source if isinstance(source, Mapping) else {"kind": source, "path": data.get("path")}
        name = values.get("path") or values.get("kind")
        if name:
            yield Path(str(name)).name


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The runs among these folders and below them; a run's own folders are not searched."""
    return [run for folder in folders for run in runs_below(folder, DEPTH)]


def runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth and folder.is_dir():
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from runs_below(child, depth - 1)


def is_run(folder: Path) -> bool:
    """Whether training was started in this folder, or its recipe is there."""
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir():
        return True
    try:
        return "train" in read_config(folder)
    except ValueError:
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved recipe of a run with later changes of its settings; ValueError says why it cannot be read."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError("config.json is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("config.json holds no recipe")
    for line in complete_lines(folder / "changes.jsonl"):
        apply_change(config, line)
    return config


def apply_change(config: dict[str, Any], line: bytes) -> None:
    """Set the values that were changed when the run was resumed; a damaged line is skipped."""
    try:
        overrides = json.loads(line)["overrides"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    for name, value in overrides:
        *path, last = name.split(".")
        values: Any = config
        for key in path:
            values = values.get(key) if isinstance(values, dict) else None
        if isinstance(values, dict):
            values[last] = value


def summarize_run(folder: Path, max_points: int = 0) -> RunSummary:
    """Read a run. max_points: the largest number of points of its curve; 0: without a curve."""
    problems, config, parameters = [], {}, None
    try:
        config = read_config(folder)
    except ValueError as error:
        problems.append(str(error))
    history = read_history(folder / "metrics.jsonl", max_points)
    if history.damaged_lines:
        problems.append(f"damaged lines in metrics.jsonl: {history.damaged_lines}")
    checkpoints, damaged = sorted_checkpoints(folder), []
    for checkpoint in checkpoints:
        if (problem := checkpoint_problem(checkpoint)) is None:
            parameters = saved_parameters(checkpoint)
            break
        damaged.append(f"{checkpoint.name}: {problem}")
    problems += damaged
    steps = table(config, "train").get("steps")
    finished = isinstance(steps, int) and history.step >= steps
    if is_locked(folder):
        state = "running"
    elif not config or (checkpoints and len(damaged) == len(checkpoints)):
        state = "damaged"
    else:
        state = "finished" if finished and checkpoints else "stopped"
    return RunSummary(folder, state, config, history, parameters, last_change(folder), tuple(problems))


def sorted_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [path for path in (folder / "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def checkpoint_problem(folder: Path) -> str | None:
    """Why a checkpoint is damaged, judged by the sizes of its files; resuming compares their SHA-256 sums too."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (folder / name).stat().st_size != entry["bytes"]:
                return f"{name} has another size than in the manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest cannot be read"
    return None


def saved_parameters(checkpoint: Path) -> int | None:
    """The number of parameters in the headers of a checkpoint's weight files; None if they cannot be read."""
    total = 0
    try:
        for file in [*checkpoint.glob("model*.safetensors"), *checkpoint.glob("adapter_model*.safetensors")]:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError):
        return None
    return total or None


def is_locked(folder: Path) -> bool:
    """Whether a process trains in this folder (run.py)."""
    return holds_lock(folder / "lock")


def holds_lock(file: Path) -> bool:
    """Whether a process holds the lock of a file."""
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def take_lock(stream: IO) -> None:
    """Lock an open file; BlockingIOError if another process holds its lock, for longer than `holds_lock` does."""
    for wait in (0.01, 0.02, 0.05, None):
        try:
            return fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise
            time.sleep(wait)


def last_change(folder: Path) -> float:
    files = [folder / name for name in ("metrics.jsonl", "config.json", "checkpoints")]
    return max((os.stat(file).st_mtime for file in files if file.exists()), default=0.0)


def differing_values(recipes: Sequence[Any], prefix: str = "") -> dict[str, list[Any]]:
    """The dotted names whose values differ between recipes, with the value in each recipe; None if it is absent.

    Tables of different kinds, and lists of different lengths, are compared as a whole.
    """
    if all(recipe == recipes[0] for recipe in recipes):
        return {}
    if all(isinstance(recipe, Mapping) for recipe in recipes) and len({recipe.get("kind") for recipe in recipes}) == 1:
        keys = dict.fromkeys(key for recipe in recipes for key in recipe)
        children = {key: [recipe.get(key) for recipe in recipes] for key in keys}
    elif all(isinstance(recipe, list) for recipe in recipes) and len(set(map(len, recipes))) == 1:
        children = {str(i): list(values) for i, values in enumerate(zip(*recipes, strict=True))}
    else:
        return {prefix: list(recipes)}
    return {
        name: values
        for key, column in children.items()
        for name, values in differing_values(column, f"{prefix}.{key}" if prefix else key).items()
    }
