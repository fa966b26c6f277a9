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


def start(path: Path, how: str = "undisturbed", moment: int = 0) -> multiprocessing.Process:
    process = PROCESSES.Process(target=child, args=(path, how, moment))
    process.start()
    return process


def exit_code(path: Path, how: str = "undisturbed", moment: int = 0) -> int:
    process = start(path, how, moment)
    process.join()
    return process.exitcode


def child(path: Path, how: str, moment: int) -> None:
    torch.set_num_threads(1)
    calls = WAYS[how](moment)
    code = trainer(path).train().exit_code
    sys.setprofile(None)
    (path / "calls").write_text(str(calls()))
    sys.exit(code)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def anywhere(moment: int) -> Callable[[], int]:
    """Die at this Python call."""
    count = 0

    def counting(*_: object) -> None:
        nonlocal count
        count += 1
        if count == moment:
            die()

    sys.setprofile(counting)
    return lambda: count


def inside_save(moment: int) -> Callable[[], int]:
    """Die at this Python call of those made by saves."""
    save, count = Trainer.save, 0

    def counting(*_: object) -> None:
        nonlocal count
        count += 1
        if count == moment:
            die()

    def counted_save(*arguments):
        sys.setprofile(counting)
        place = save(*arguments)
        sys.setprofile(None)
        return place

    Trainer.save = counted_save
    return lambda: count


def half_a_file(moment: int) -> Callable[[], int]:
    """Die in the middle of the writing of this file of tensors."""
    count = 0

    def torn(save_file):
        def write(tensors, path, **options):
            nonlocal count
            count += 1
            save_file(tensors, path, **options)
            if count == moment:
                os.truncate(path, os.path.getsize(path) // 2)
                die()

        return write

    resume_state.save_file, weight_files.save_file = torn(resume_state.save_file), torn(weight_files.save_file)
    return lambda: count


def interrupted(moment: int) -> Callable[[], int]:
    """Ctrl-C during this step."""
    step = Trainer.step

    def signalled(self, batches, place):
        if place.step + 1 == moment:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batches, place)

    Trainer.step = signalled
    return lambda: 0


WAYS = {
    "undisturbed": lambda moment: lambda: 0,
    "anywhere": anywhere,
    "inside save": inside_save,
    "half a file": half_a_file,
    "interrupted": interrupted,
}
