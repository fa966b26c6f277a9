"""Training in a separate process that is killed at a chosen Python call, inside a save or anywhere.

Counting calls instead of seconds makes a random moment repeatable.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from regard.checkpoint import weight_files
from regard.training import resume_state
from regard.training.loop import Trainer
from tests.training.tiny import trainer

PROCESSES = multiprocessing.get_context("forkserver")  # torch is imported once, by the server
PROCESSES.set_forkserver_preload(["torch._dynamo", "torch.utils.tensorboard", "tests.training.killing"])


def start(path: Path, mode: str = "undisturbed", moment: int = 0) -> multiprocessing.Process:
    process = PROCESSES.Process(target=child, args=(path, mode, moment))
    process.start()
    return process


def exit_code(path: Path, mode: str = "undisturbed", moment: int = 0) -> int:
    process = start(path, mode, moment)
    process.join()
    return process.exitcode


def child(path: Path, mode: str, moment: int) -> None:
    torch.set_num_threads(1)
    calls = MODES[mode](moment)
    code = trainer(path).train().exit_code
    sys.setprofile(None)
    (path / "calls").write_text(str(calls()))
    sys.exit(code)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def anywhere(moment: int) -> Callable[[], int]:
    """Kill the process at this Python call."""
    count = 0

    def counting(*_: object) -> None:
        nonlocal count
        count += 1
        if count == moment:
            kill_self()

    sys.setprofile(counting)
    return lambda: count


def inside_save(moment: int) -> Callable[[], int]:
    """Kill the process at this Python call, counted only inside saves."""
    save, count = Trainer.save, 0

    def counting(*_: object) -> None:
        nonlocal count
        count += 1
        if count == moment:
            kill_self()

    def counted_save(*arguments):
        sys.setprofile(counting)
        result = save(*arguments)
        sys.setprofile(None)
        return result

    Trainer.save = counted_save
    return lambda: count


def half_a_file(moment: int) -> Callable[[], int]:
    """Kill the process when this file of tensors is half written."""
    count = 0

    def truncating(save_file):
        def write(tensors, path, **options):
            nonlocal count
            count += 1
            save_file(tensors, path, **options)
            if count == moment:
                os.truncate(path, os.path.getsize(path) // 2)
                kill_self()

        return write

    resume_state.save_file = truncating(resume_state.save_file)
    weight_files.save_file = truncating(weight_files.save_file)
    return lambda: count


def interrupted(moment: int) -> Callable[[], int]:
    """Send SIGINT, as Ctrl-C does, during this step."""
    step = Trainer.step

    def signalled(self, batches, position):
        if position.step + 1 == moment:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batches, position)

    Trainer.step = signalled
    return lambda: 0


MODES = {
    "undisturbed": lambda moment: lambda: 0,
    "anywhere": anywhere,
    "inside save": inside_save,
    "half a file": half_a_file,
    "interrupted": interrupted,
}
