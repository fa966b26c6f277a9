"""Write prepared examples (shards.py): encode the examples of a source in several processes.

A shard holds a fixed range of examples and is written by one process, so that the files do not depend on the number of
processes. A shard is written under a hidden name, synced and renamed. After a kill, the same call keeps the finished
shards, if their checksums are right, and writes the others; the result is that of an undisturbed call. A process keeps
one example and the offsets of its shard in memory.
"""

import fcntl
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.column_writer import ColumnWriter
from regard.data.file_index import FileError
from regard.data.shards import (
    PREPARED,
    SHARD,
    VERSION,
    PreparedError,
    ShardedExamples,
    check_sums,
    read_checked,
    sync_names,
    write_checked,
)

MAX_SHARDS, MIN_PER_SHARD = 256, 256  # few enough to map all, many enough to keep processes busy
REPORT_SECONDS = 0.2
PARTIAL = ".partial"

Encode = Callable[[Any], Mapping[str, np.ndarray]]
ReportProgress = Callable[[int, int], None]  # called with the numbers of examples and tokens since the last call


class PreparationListener:
    """Receives the progress; the base class ignores it."""

    def started(self, done: int, total: int) -> None:
        """Of `total` examples, `done` are in shards that a previous call finished."""

    def advanced(self, examples: int, tokens: int) -> None:
        """More examples were encoded."""

    def note(self, text: str) -> None:
        """A message for the user."""

    def ended(self) -> None:
        """All shards are written, or an error ended the call."""


SILENT = PreparationListener()


@dataclass(frozen=True)
class Preparation:
    """Everything that a process needs to write a shard; it is pickled for each one."""

    examples: Sequence[Any]
    encode: Encode
    folder: Path
    token_columns: Sequence[str]
    fingerprints: Mapping[str, str]
    per_shard: int

    @property
    def shards(self) -> int:
        return -(-len(self.examples) // self.per_shard)

    def settings(self) -> dict[str, Any]:
        """The values that all shards of a folder share."""
        return {
            "version": VERSION,
            "token_columns": list(self.token_columns),
            "fingerprints": dict(self.fingerprints),
            "examples": len(self.examples),
            "examples_per_shard": self.per_shard,
        }

    def rows(self, number: int) -> range:
        """The indices of the examples of a shard."""
        return range(number * self.per_shard, min((number + 1) * self.per_shard, len(self.examples)))

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}"


def prepare(
    examples: Sequence[Any],
    encode: Encode,
    folder: str | Path,
    fingerprints: Mapping[str, str],
    token_columns: Sequence[str] | None = None,
    processes: int = 1,
    per_shard: int | None = None,
    listener: PreparationListener = SILENT,
) -> ShardedExamples:
    """Encode all examples and write them to a folder; call it again to continue after an interruption.

    encode: returns the columns of an example as one-dimensional arrays. With more than one process, it and the examples
    must be picklable. fingerprints: of everything that the columns depend on, for example of source, tokenizer and
    objective. token_columns: the columns whose values count as tokens; by default the first one of the first example.
    """
    if not len(examples):
        raise PreparedError("there are no examples to prepare; check the source")
    with named_errors(examples, 0):
        first = encode(examples[0])
    per_shard = per_shard or max(MIN_PER_SHARD, -(-len(examples) // MAX_SHARDS))
    task = Preparation(examples, encode, Path(folder), token_columns or list(first)[:1], fingerprints, per_shard)
    with locked(task.folder):
        remove_leftovers(task)
        pending = [number for number in range(task.shards) if not is_finished(task, number, listener.note)]
        if pending:
            (task.folder / PREPARED).unlink(missing_ok=True)
        listener.started(len(examples) - sum(len(task.rows(number)) for number in pending), len(examples))
        try:
            if processes > 1 and len(pending) > 1:
                write_in_processes(task, pending, min(processes, len(pending)), listener.advanced)
            else:
                for number in pending:
                    write_shard(task, number, listener.advanced)
            write_description(task)
        finally:
            listener.ended()
    return ShardedExamples(task.folder)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the lock of a folder; the operating system releases it when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise PreparedError(f"another process writes {folder}; wait for it or choose another folder") from None
    try:
        yield
    finally:
        os.close(handle)


def remove_leftovers(task: Preparation) -> None:
    """Delete the partial shards of a killed process; refuse a folder with other files."""
    expected = {PREPARED, *(task.path(number).name for number in range(task.shards))}
    for entry in task.folder.iterdir():
        if entry.name.startswith(".") and entry.name.endswith(PARTIAL):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        elif entry.name not in expected:
            raise PreparedError(
                f"{task.folder} has {entry.name}, which is not a file of these examples; use a new folder"
            )


def is_finished(task: Preparation, number: int, note: Callable[[str], None]) -> bool:
    """Whether a shard is complete and undamaged. A damaged one is deleted; one with other settings is an error."""
    path = task.path(number)
    if not path.exists():
        return False
    try:
        shard = read_checked(path / SHARD)
        check_sums(path, shard["files"])
    except PreparedError as error:
        note(f"{path} is written again, because it is damaged ({error})")
        remove_shard(path)
        return False
    refuse_other_settings(task, shard["settings"])
    return True


def refuse_other_settings(task: Preparation, found: Mapping[str, Any]) -> None:
    for name, value in task.settings().items():
        if found[name] != value:
            difference = f"{name}={found[name]}, and now it is {value}"
            if name == "fingerprints":
                changed = [key for key in value if found[name].get(key) != value[key]]
                difference = f"another {' and another '.join(changed or found[name])}"
            raise PreparedError(
                f"{task.folder} was prepared with {difference}; choose another folder, or delete this one"
            )


def remove_shard(path: Path) -> None:
    """Delete a shard. It is renamed first, so that no part of it is left under its name."""
    leftover = path.with_name(f".{path.name}{PARTIAL}")
    path.rename(leftover)
    shutil.rmtree(leftover)


def write_shard(task: Preparation, number: int, report: ReportProgress) -> None:
    path = task.path(number)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    partial.mkdir()
    writers: dict[str, ColumnWriter] = {}
    rows = task.rows(number)
    last, examples, tokens, total = time.monotonic(), 0, 0, 0
    try:
        for row in rows:
            tokens += append_example(task, row, row - rows.start, writers, partial)
            examples += 1
            if time.monotonic() - last > REPORT_SECONDS:
                report(examples, tokens)
                last, examples, tokens, total = time.monotonic(), 0, 0, total + tokens
        files = {name: entry for writer in writers.values() for name, entry in writer.close().items()}
        columns = {name: writer.description() for name, writer in writers.items()}
        counts = {"examples": len(rows), "tokens": total + tokens}
        entry = {"name": path.name, **counts, "columns": columns, "files": files}
        write_checked(partial / SHARD, {**entry, "settings": task.settings()})
        if path.exists():  # by a process that outlived its killed parent; it wrote the same
            remove_shard(path)
        partial.rename(path)
        sync_names(task.folder)
    except BaseException:
        for writer in writers.values():
            writer.stream.close()
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(examples, tokens)


def append_example(task: Preparation, row: int, previous: int, writers: dict[str, ColumnWriter], folder: Path) -> int:
    """Encode one example and append its columns; returns the number of tokens. `previous` rows are in the shard."""
    with named_errors(task.examples, row):
        columns = task.encode(task.examples[row])
        for name in columns.keys() - writers.keys():
            if not re.fullmatch(r"[A-Za-z]\w*", name):
                raise ValueError(f"the column {name!r} cannot be the name of a file; use letters, digits and _")
        for name in columns:
            if name not in writers:
                writers[name] = ColumnWriter(folder, name, previous)
            writers[name].append(columns[name])
    for name in writers.keys() - columns.keys():
        writers[name].skip()
    return sum(len(columns[name]) for name in task.token_columns if name in columns)


@contextmanager
def named_errors(examples: Sequence[Any], row: int) -> Generator[None]:
    """Name the example in errors, by its file and line if it has them."""
    try:
        yield
    except FileError:  # it names the file
        raise
    except ValueError as error:
        origin = getattr(examples, "origin", lambda row: f"example {row}")
        raise PreparedError(f"{origin(row)}: {error}") from error


def write_in_processes(task: Preparation, pending: Sequence[int], processes: int, report: ReportProgress) -> None:
    """Write shards in processes, which receive their numbers through pipes and end when their pipe is closed."""
    context = get_context("spawn")  # a fork would copy the locks of threads
    remaining = list(reversed(pending))
    workers = {}
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(target=work, args=(task, theirs), daemon=True)
            worker.start()
            theirs.close()
            workers[ours] = worker
            ours.send(remaining.pop())
        busy = set(workers)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    raise PreparedError(
                        "a process was killed, perhaps for lack of memory; the finished shards are kept: run the same "
                        "command again, with fewer processes"
                    ) from None
                if isinstance(message, BaseException):
                    raise message
                if message is not None:
                    report(*message)
                elif remaining:
                    pipe.send(remaining.pop())
                else:
                    pipe.close()
                    busy.remove(pipe)
    finally:
        for pipe, worker in workers.items():
            pipe.close()
            worker.terminate()
            worker.join()


def work(task: Preparation, pipe: Connection) -> None:
    """A process: write the shards whose numbers arrive. It sends counts, then None after each shard, or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        while True:
            write_shard(task, pipe.recv(), lambda examples, tokens: pipe.send((examples, tokens)))
            pipe.send(None)
    except (EOFError, BrokenPipeError):  # the parent ended
        pass
    except Exception as error:
        pipe.send(error)


def write_description(task: Preparation) -> None:
    """Write prepared.json from the entries of all shards."""
    shards = []
    for number in range(task.shards):
        entry = read_checked(task.path(number) / SHARD)
        shards.append({name: entry[name] for name in ("name", "examples", "tokens", "columns", "files")})
    tokens = sum(shard["tokens"] for shard in shards)
    write_checked(task.folder / PREPARED, {**task.settings(), "tokens": tokens, "shards": shards})
