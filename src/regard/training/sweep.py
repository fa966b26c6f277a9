"""A sweep: one run per setting of varied values, each in its own process.

    sweep.json            the recipe, the varied values, and state and results of every trial
    trial-001/ …          ordinary run directories (run.py)
    output/trial-001.txt  the printed output of a trial

A sweep that was interrupted or killed is continued by the same call: finished trials are skipped, and those that have a
run directory are resumed. A trial that fails is recorded with its error, and the others go on.
"""

import fcntl
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from regard.checkpoint.atomic_folder import write_file
from regard.training.recipe import find_recipe, read_recipe, resolve
from regard.training.run_summary import is_locked, summarize_run
from regard.training.stop_signal import handle_signals
from regard.training.variations import Values

SweepState = Literal["waiting", "running", "finished", "stopped", "failed"]
POLL_SECONDS = 0.1
INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)  # exit codes of a run that was stopped by a signal


@dataclass
class SweepTrial:
    name: str
    values: dict[str, str]
    state: SweepState = "waiting"
    seconds: float = 0.0
    error: str | None = None
    results: dict[str, Any] = field(default_factory=dict)  # RunSummary.to_dict
    title: str = ""  # printed instead of the values

    @property
    def label(self) -> str:
        return self.title or ", ".join(f"{name}={value}" for name, value in self.values.items())

    @property
    def held_out_loss(self) -> float | None:
        return self.results.get("held_out_loss")


class Process(Protocol):
    """A trial that was started."""

    def poll(self) -> int | None: ...  # the exit code, or None while it runs

    def send_signal(self, number: int, /) -> None: ...


StartProcess = Callable[[list[str], Path, int], Process]  # (arguments of `regard`, output file, slot)


@dataclass
class Sweep:
    """The trials of a recipe in a directory. `device` is that of `regard train`."""

    path: Path
    recipe: str
    overrides: dict[str, str]
    trials: list[SweepTrial]
    device: str = "auto"
    folder: str = "."  # in which the sweep was started; relative paths in the recipe refer to it
    tables: dict[str, Any] = field(default_factory=dict)  # the recipe with its overrides
    study: dict[str, Any] = field(default_factory=dict)  # the options of `regard scale` that chose the trials

    @classmethod
    def open(cls, path: Path) -> "Sweep":
        """Read the sweep in a directory."""
        file = path / "sweep.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            trials = [SweepTrial(**trial) for trial in data.pop("trials")]
            return cls(path=path, trials=trials, **data)
        except FileNotFoundError:
            raise ValueError(
                f"{path} holds no sweep: it has no sweep.json; start one with: regard sweep, or regard scale"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} cannot be read ({error}); remove it to start the sweep again") from None

    @classmethod
    def create(cls, path: Path, recipe: str, overrides: Values, settings: Sequence[Values], device: str) -> "Sweep":
        """A sweep over these settings. If the directory holds this sweep already, new settings are added to it."""
        recipe = str(Path(recipe).absolute()) if Path(recipe).is_file() else recipe
        tables = json.loads(json.dumps(read_recipe(find_recipe(recipe), dict(overrides)), default=str))
        sweep = cls(path, recipe, dict(overrides), [], device, os.getcwd(), tables)
        if (path / "sweep.json").exists():
            earlier = cls.open(path)
            if (earlier.recipe, earlier.tables) != (recipe, tables):
                raise ValueError(
                    f"{path} holds a sweep of another recipe, or of other values; choose another directory with --out"
                )
            sweep.trials, sweep.study = earlier.trials, earlier.study
        known = [trial.values for trial in sweep.trials]
        for values in settings:
            if values not in known:
                sweep.trials.append(SweepTrial(f"trial-{len(sweep.trials) + 1:03d}", dict(values)))
        return sweep

    def check(self) -> None:
        """Raise ValueError if the recipe of a trial that has no run yet is not valid.

        A tokenizer is trained once per table of data and tokenizer.
        """
        tokenizers: dict[str, Any] = {}
        for trial in (trial for trial in self.trials if not (self.path / trial.name / "config.json").exists()):
            tables = read_recipe(find_recipe(self.recipe), {**self.overrides, **trial.values})
            key = json.dumps([tables.get("data"), tables.get("tokenizer")], sort_keys=True, default=str)
            try:
                tokenizers[key] = resolve(tables, tokenizers.get(key))[1]
            except ValueError as error:
                raise ValueError(f"{trial.name} ({trial.label}): {error}") from error

    def write(self) -> None:
        """Write sweep.json; a kill leaves the old or the new file."""
        self.path.mkdir(parents=True, exist_ok=True)
        data = {name: value for name, value in asdict(self).items() if name != "path"}
        write_file(self.path / "sweep.json", (json.dumps(data, indent=2, default=str) + "\n").encode())

    def command(self, trial: SweepTrial) -> list[str]:
        """The arguments of `regard` that start or resume a trial."""
        run = (self.path / trial.name).absolute()
        if (run / "config.json").exists():
            return ["train", "--resume", str(run), "--device", self.device]
        values = {**self.overrides, **trial.values}
        options = [f"--{name}={value}" for name, value in values.items()]
        return ["train", self.recipe, "--out", str(run), "--device", self.device, *options]

    def run(self, start: StartProcess, jobs: int, note: Callable[[str], None]) -> bool:
        """Run all trials that are not finished, `jobs` at a time. Returns False if a signal stopped the sweep."""
        with self.locked(), catch_signals() as stop:
            waiting = deque(trial for trial in self.trials if not self.update(trial))
            running: dict[int, tuple[SweepTrial, Process, float]] = {}  # by slot
            signals_sent = 0
            while running or waiting and not stop.count:
                for slot in sorted(set(range(jobs)) - running.keys()):
                    if waiting and not stop.count and (trial := self.next_unlocked(waiting, note)):
                        running[slot] = (trial, self.start(trial, start, slot, note), time.monotonic())
                for slot, (trial, process, started) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[slot]
                        self.finish(trial, code, time.monotonic() - started, note)
                if stop.count > signals_sent:
                    signals_sent = stop.count
                    note("stopping: the running trials finish their step and are saved; Ctrl-C again stops at once")
                    for _, process, _ in running.values():
                        process.send_signal(signal.SIGINT)
                time.sleep(POLL_SECONDS)
            self.write()
        return not stop.count

    def next_unlocked(self, waiting: deque[SweepTrial], note: Callable[[str], None]) -> SweepTrial | None:
        """The next trial that no other process trains: a killed sweep leaves the processes of its trials running."""
        trial = waiting.popleft()
        if not is_locked(self.path / trial.name):
            return None if self.update(trial) else trial
        if trial.state != "running":
            trial.state = "running"
            note(f"{trial.name} is trained by another process; waiting for it")
        waiting.append(trial)
        return None

    def start(self, trial: SweepTrial, start: StartProcess, slot: int, note: Callable[[str], None]) -> Process:
        output = self.path / "output" / f"{trial.name}.txt"
        output.parent.mkdir(parents=True, exist_ok=True)
        arguments = self.command(trial)
        trial.state, trial.error = "running", None
        self.write()
        note(f"{trial.name} {'resumes' if '--resume' in arguments else 'starts'}: {trial.label}")
        return start(arguments, output.absolute(), slot)

    def finish(self, trial: SweepTrial, code: int, seconds: float, note: Callable[[str], None]) -> None:
        trial.seconds = round(trial.seconds + seconds, 3)
        self.update(trial)
        if code in INTERRUPTED:
            trial.state = "stopped"
        elif code:
            trial.state, trial.error = "failed", last_line(self.path / "output" / f"{trial.name}.txt", code)
        self.write()
        done = sum(other.state == "finished" for other in self.trials)
        loss = "" if trial.held_out_loss is None else f", held-out loss {trial.held_out_loss:.4f}"
        reason = f": {trial.error}" if trial.error else ""
        note(f"{trial.name} {trial.state}{loss}{reason}  ({done}/{len(self.trials)} finished)")

    def update(self, trial: SweepTrial) -> bool:
        """Read the results of a trial from its run. Returns whether it is finished."""
        folder = self.path / trial.name
        if (folder / "config.json").exists():
            summary = summarize_run(folder)
            trial.results = summary.to_dict()
            if summary.state == "finished":
                trial.state, trial.error = "finished", None
                return True
        if trial.state in ("running", "finished"):  # the sweep was killed, or the run was deleted
            trial.state = "stopped" if trial.results else "waiting"
        return False

    @property
    def ranking(self) -> list[SweepTrial]:
        """The trials, lowest held-out loss first, then those without one."""
        return sorted(self.trials, key=lambda trial: (trial.held_out_loss is None, trial.held_out_loss or 0.0))

    @contextmanager
    def locked(self) -> Generator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "sweep.lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process runs the sweep in {self.path}; wait for it") from None
            yield


def last_line(output: Path, code: int) -> str:
    """The error that a trial printed last."""
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    printed = [line.strip() for line in lines if line.strip()]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return printed[-1].removeprefix("regard: ") if printed else f"exit code {code}"


class SignalCount:
    """The number of signals so far."""

    def __init__(self) -> None:
        self.count = 0

    def handle(self, number: int, frame: object) -> None:
        self.count += 1


@contextmanager
def catch_signals() -> Generator[SignalCount]:
    """Count Ctrl-C, SIGTERM and SIGHUP instead of ending the process."""
    signals = SignalCount()
    with handle_signals(signals.handle, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield signals


def threads_of_job(cpus: int, jobs: int) -> int:
    return max(1, cpus // jobs)


def job_environment(slot: int, jobs: int, cpus: int, gpus: Sequence[str]) -> dict[str, str]:
    """Variables for the process in a slot: its share of the CPU threads, and one of the GPUs if there are several."""
    threads = {"OMP_NUM_THREADS": str(threads_of_job(cpus, jobs))} if jobs > 1 else {}
    return threads | ({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if jobs > 1 and len(gpus) > 1 else {})
