"""Examples and an encoder for the tests of prepared shards, importable by the processes that they start.

`python -m tests.data.preparation kill-all FOLDER 1` compares kills at every event of writing with an undisturbed call,
and prints the number of kills. It starts no process that imports torch, so a kill costs milliseconds.
"""

import hashlib
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from regard.data.column_writer import ColumnWriter
from regard.data.prepare import PreparationListener, prepare
from regard.data.shards import ShardedExamples


class Numbers:
    """The examples 0, 1, 2 …"""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def encode(example: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(example)
    count = int(rng.integers(0, 40))  # an example may be empty
    columns = {"tokens": rng.integers(0, 5000, count), "label": np.array([-example])}
    return columns if example % 5 == 1 else columns | {"weights": rng.integers(0, 9, count).astype(np.float32) / 10}


def encode_until_17(example: int) -> dict[str, np.ndarray]:
    if example == 17:
        raise ValueError("seventeen")
    return encode(example)


def write(folder: Path, count: int = 60, processes: int = 1, listener: PreparationListener | None = None, per_shard=16):
    return prepare(
        Numbers(count), encode, folder, {"source": "numbers"},
        processes=processes, per_shard=per_shard, listener=listener or PreparationListener(),
    )  # fmt: skip


def contents(folder: Path) -> dict[str, str]:
    """The checksum of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class KillAfter(PreparationListener):
    """Kills the process when so many examples are encoded."""

    def __init__(self, examples: int):
        self.left = examples

    def advanced(self, examples: int, tokens: int) -> None:
        self.left -= examples
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at_event(number: int) -> None:
    """Kill this process before or after the given call of a function that changes files."""
    calls = 0

    def watched(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for owner, names in ((os, ("fsync",)), (Path, ("rename", "mkdir", "unlink")), (shutil, ("rmtree",))):
        for name in names:
            setattr(owner, name, watched(getattr(owner, name)))
    ColumnWriter.append = watched(ColumnWriter.append)
    ColumnWriter.close = watched(ColumnWriter.close)


def in_child(folder: Path, event: int) -> bool:
    """Prepare in a forked process that is killed at an event; returns whether it was."""
    child = os.fork()
    if not child:
        kill_at_event(event)
        write(folder, count=20, per_shard=8)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_at_events(folder: Path, every: int) -> int:
    """Kill at every n-th event, in calls that are compared with an undisturbed one; returns the number of kills."""
    write(folder / "undisturbed", count=20, per_shard=8)
    expected = contents(folder / "undisturbed")
    for kills, event in enumerate(itertools.count(1, every)):
        out = folder / str(event)
        if not in_child(out, event):
            assert contents(out) == expected
            return kills
        in_child(out, event // 2)  # a second kill, during the repair
        write(out, count=20, per_shard=8)
        assert contents(out) == expected, f"after a kill at event {event}"
        ShardedExamples(out).verify()
    raise AssertionError("unreachable")


if __name__ == "__main__":
    command, out = sys.argv[1], Path(sys.argv[2])
    os.fsync = lambda handle: None  # it matters only if the machine fails, and takes most of the time
    if command == "kill-all":
        print(kill_at_events(out, int(sys.argv[3])))
    else:
        write(out, count=2000, processes=2, listener=KillAfter(300), per_shard=100)
