"""Training in a separate process that is killed at a chosen Python call, inside a save or anywhere.

Counting calls instead of seconds makes a random moment repeatable.
"""

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from regard.checkpoint import weight_files
from regard.training import resume_state
from regard.training.loop import Trainer
from regard.training.resume_state import TrainingSnapshot
from regard.training.saver import Saver
from tests.forkserver import PROCESSES
from tests.training.tiny import trainer


def start(path: Path, mode: str = "undisturbed", moment: int = 0) -> multiprocessing.Process:
    process = PROCESSES.Process(target=train_in_child, args=(path, mode, moment))
    process.start()
    return process


def exit_code(path: Path, mode: str = "undisturbed", moment: int = 0) -> int:
    process = start(path, mode, moment)
    process.join()
    return process.exitcode


def train_in_child(path: Path, mode: str, moment: int) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # as in tests/conftest.py; a killed process loses nothing that it has written
    calls = MODES[mode](moment)
    try:
        code = trainer(path).train().exit_code
    except ValueError as error:  # as the command line reports it
        (path / "error").write_text(str(error))
        sys.exit(1)
    sys.setprofile(None)
    (path / "calls").write_text(str(calls()))
    sys.exit(code)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_anywhere(moment: int) -> Callable[[], int]:
    """Kill the process at this Python call."""
    count = 0

    def count_call(*_: object) -> None:
        nonlocal count
        count += 1
        if count == moment:
            kill_self()

    sys.setprofile(count_call)
    return lambda: count


def kill_inside_save(moment: int) -> Callable[[], int]:
    """Kill the process at this Python call, counted only in the thread that writes checkpoints."""
    write, count = Saver.write, 0

    def count_call(*_: object) -> None:
        nonlocal count
        count += 1
        if count == moment:
            kill_self()

    def counted_write(*arguments):
        sys.setprofile(count_call)
        try:
            return write(*arguments)
        finally:
            sys.setprofile(None)

    Saver.write = counted_write
    return lambda: count


def kill_while_saving(moment: int) -> Callable[[], int]:
    """Kill the process at this Python call of the thread that trains; saves take as long as several steps."""
    write = TrainingSnapshot.write

    def slow_write(snapshot: TrainingSnapshot, folder: Path) -> None:
        time.sleep(0.03)
        write(snapshot, folder)
        time.sleep(0.03)

    TrainingSnapshot.write = slow_write
    return kill_anywhere(moment)


def kill_within_a_file(moment: int) -> Callable[[], int]:
    """Kill the process when this file of tensors is half written."""
    count = 0

    def kill_while_writing(save_file):
        def write(tensors, path, **options):
            nonlocal count
            count += 1
            save_file(tensors, path, **options)
            if count == moment:
                os.truncate(path, os.path.getsize(path) // 2)
                kill_self()

        return write

    resume_state.save_file = kill_while_writing(resume_state.save_file)
    weight_files.save_file = kill_while_writing(weight_files.save_file)
    return lambda: count


def interrupt(moment: int) -> Callable[[], int]:
    """Send SIGINT, as Ctrl-C does, during this step."""
    step = Trainer.step

    def step_with_signal(self, batch, position, start):
        if position.step + 1 == moment:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, position, start)

    Trainer.step = step_with_signal
    return lambda: 0


def limit_file_size(moment: int) -> Callable[[], int]:
    """Writing more than 20 kB to a file fails: less than the weights, more than the log."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return lambda: 0


MODES = {
    "undisturbed": lambda moment: lambda: 0,
    "anywhere": kill_anywhere,
    "inside save": kill_inside_save,
    "while saving": kill_while_saving,
    "half a file": kill_within_a_file,
    "interrupted": interrupt,
    "small files": limit_file_size,
}
