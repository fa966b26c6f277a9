"""Two processes of torchrun that are killed at a chosen Python call, in a save or anywhere, and resumed.

    one        one of the two processes: torchrun ends or restarts both
    both       both processes
    torchrun   torchrun itself; the two processes are orphans, which go on or end
    all        torchrun and both processes

python -m tests.training.parallel.killing KILLS FOLDER [SEED] kills runs until there are so many kills, and prints them.
"""

import fcntl
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from regard.training.loop import Trainer
from regard.training.parallel import sharded_files, snapshot
from regard.training.parallel.mesh import Parallel, make_processes, process_group, process_rank, restarts
from regard.training.parallel.shared_run import SharedRun
from regard.training.parallel.snapshot import SharedSnapshot
from regard.training.run import Run
from regard.training.saver import Saver
from tests.forkserver import PROCESSES
from tests.training.tiny import SETTINGS, SPEC, loader, next_token, outcome

PARALLEL = {"fsdp": Parallel(), "ddp": Parallel(replicate=2, shard=1)}
MODES = ("anywhere", "inside save", "while saving", "half a file")
TARGETS = ("one", "both", "torchrun", "all")


@dataclass(frozen=True)
class Kill:
    """`rank` kills the target at this Python call of the thread that the mode counts; never with moment 0."""

    parallel: str = "fsdp"
    mode: str = "anywhere"
    target: str = "one"
    rank: int = 0
    moment: int = 0
    restart: bool = False  # torchrun starts the two processes again


def launch(path: Path, kill: Kill) -> int:
    """torchrun with two processes; returns its exit code after they have ended."""
    path.mkdir(exist_ok=True)
    for file in path.glob("pid-*"):
        file.unlink()
    agent = PROCESSES.Process(target=run_agent, args=(path, kill))
    agent.start()
    agent.join()
    with (path / "workers").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # the processes hold it as long as they live
    return agent.exitcode


def run_agent(path: Path, kill: Kill) -> None:
    """What torchrun does; its processes are forked, so that torch is not imported again."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logging.disable(logging.ERROR)
    config = LaunchConfig(
        1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id=path.name, start_method="fork",
        max_restarts=int(kill.restart), monitor_interval=0.05, logs_specs=DefaultLogsSpecs(str(path / "logs"), Std.ALL),
    )  # fmt: skip
    try:
        elastic_launch(config, run_worker)(path, kill)
    except ChildFailedError:
        sys.exit(1)


def run_worker(path: Path, kill: Kill) -> None:
    """One of the two processes; without torchrun it ends here, because nobody reads its result."""
    parent = os.getppid()
    try:
        train(path, kill)
    finally:
        if os.getppid() != parent:
            os._exit(1)


def train(path: Path, kill: Kill) -> None:
    alive = (path / "workers").open("w")
    fcntl.flock(alive, fcntl.LOCK_SH)
    (path / f"pid-{process_rank()}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # as in tests/conftest.py; a killed process loses nothing that it has written
    moments = Moments(path, kill if restarts() == 0 else replace(kill, moment=0))
    moments.count()
    with process_group("cpu") as device:
        processes = make_processes(PARALLEL[kill.parallel], device)
        if processes.is_main and not (path / "config.json").exists():
            Run.create(path, {"train": SETTINGS.to_dict()})
        processes.wait_for_all()
        rows = (processes.row_rank, processes.row_ranks)
        Trainer(
            SPEC.build(SETTINGS.seed),
            loader("train", *rows),
            next_token,
            SETTINGS,
            SharedRun(path, processes),
            held_out=list(islice(loader("held-out", *rows), 2)),
            processes=processes,
        ).train()
        sys.setprofile(None)
        processes.wait_for_all()
    (path / f"calls-{process_rank()}").write_text(str(moments.calls))


class Moments:
    """Counts the moments at which the mode can kill, and kills at the chosen one."""

    def __init__(self, path: Path, kill: Kill):
        self.path, self.kill, self.calls, self.saving = path, kill, 0, False

    def count(self) -> None:
        write, mode = Saver.write, self.kill.mode

        def watched_write(*arguments):
            self.saving = True
            if mode == "inside save":
                sys.setprofile(self.pass_moment)
            try:
                return write(*arguments)
            finally:
                sys.setprofile(None)
                self.saving = False

        Saver.write = watched_write
        if mode == "half a file":
            sharded_files.save_file = self.watch_file(sharded_files.save_file)
            snapshot.save_file = self.watch_file(snapshot.save_file)
        if mode == "while saving":
            SharedSnapshot.write = write_slowly(SharedSnapshot.write)
        if mode in ("anywhere", "while saving"):
            sys.setprofile(self.pass_moment)

    def pass_moment(self, *_: object) -> None:
        self.calls += 1
        if self.calls == self.kill.moment and process_rank() == self.kill.rank:
            self.kill_target()

    def watch_file(self, save_file: Callable) -> Callable:
        """Kill when this file of tensors is half written."""

        def write(tensors, file, **options):
            save_file(tensors, file, **options)
            dies = self.kill.target != "torchrun" and process_rank() == self.kill.rank
            if dies and self.calls + 1 == self.kill.moment:
                os.truncate(file, os.path.getsize(file) // 2)
            self.pass_moment()

        return write

    def kill_target(self) -> None:
        """Record the kill, and whether it is inside a save; then kill."""
        with (self.path / "kills").open("a") as stream:
            stream.write(f"{self.kill.parallel}, {self.kill.mode}, {self.kill.target}, {self.saving}\n")
        others = [self.path / f"pid-{rank}" for rank in range(2) if rank != self.kill.rank]
        pids = {
            "one": [os.getpid()],
            "both": [*(int(file.read_text()) for file in others if file.exists()), os.getpid()],
            "torchrun": [os.getppid()],
        }
        pids["all"] = pids["torchrun"] + pids["both"]
        for pid in pids[self.kill.target]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def write_slowly(write: Callable) -> Callable:
    """Saves take as long as several steps."""

    def slow_write(snapshot: SharedSnapshot, folder: Path) -> None:
        time.sleep(0.03)
        write(snapshot, folder)
        time.sleep(0.03)

    return slow_write


class Killer:
    """Undisturbed runs, whose moments are counted, and random kills of further runs, which must end like these."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.expected: dict[str, dict[str, Any]] = {}
        self.calls: dict[tuple[str, str, int], int] = {}

    def count_moments(self, parallel: str, mode: str) -> None:
        path = self.folder / f"counted-{parallel}-{mode.replace(' ', '-')}"
        assert launch(path, Kill(parallel, mode)) == 0, path / "logs"
        assert outcome(path) == self.expected.setdefault(parallel, outcome(path))
        for rank in range(2):
            self.calls[parallel, mode, rank] = int((path / f"calls-{rank}").read_text())

    def kill_run(self, seed: int, kills: int = 2) -> list[str]:
        """A run that is killed so often at random moments must end as expected; returns a line per kill."""
        rng, path, step = random.Random(seed), self.folder / f"run-{seed}", 0
        parallel = rng.choice(list(PARALLEL))
        for _ in range(kills):
            mode, target, rank = rng.choice(MODES), rng.choice(TARGETS), rng.randrange(2)
            if (parallel, mode, rank) not in self.calls:
                self.count_moments(parallel, mode)
            moment = rng.randint(1, self.calls[parallel, mode, rank])
            launch(path, Kill(parallel, mode, target, rank, moment, restart=rng.random() < 0.5))
            assert latest_step(path) >= step, f"{path}: a committed checkpoint was lost"
            step = latest_step(path)
        assert launch(path, Kill(parallel)) == 0, path
        assert outcome(path) == self.expected[parallel], f"{path} differs from the undisturbed run"
        lines = path / "kills"
        return lines.read_text().splitlines() if lines.exists() else []


def latest_step(path: Path) -> int:
    folder = Run(path).latest()
    return int(folder.name.removeprefix("step-")) if folder else 0


def main(kills: int, folder: Path, seed: int = 0) -> None:
    start, killer, lines = time.time(), Killer(folder), []
    while len(lines) < kills:
        lines += killer.kill_run(seed)
        shutil.rmtree(folder / f"run-{seed}")
        seed += 1
        inside = sum(line.endswith("True") for line in lines)
        print(f"seed {seed}: {len(lines)} kills, {inside} inside saves, {time.time() - start:.0f} s", flush=True)
    print(*(f"{count:4} {line}" for line, count in sorted(Counter(lines).items())), sep="\n")


if __name__ == "__main__":
    from tests.training.parallel import killing  # functions of __main__ cannot be sent to another process

    killing.main(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
