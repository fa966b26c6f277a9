"""Saving in the background: training continues while a checkpoint is written, synced to disk and renamed.

A snapshot is taken between two steps, in memory. At most one checkpoint is being written: the next save waits for it.
An error is raised at the next step, the next save or the end of training. A process that is killed meanwhile leaves the
previous checkpoint. Several processes raise an error at the same step, when all of them have ended the save.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError

from regard.checkpoint.atomic_folder import CheckpointError
from regard.training.run import Run


class WritableState(Protocol):
    """A Snapshot, or the SharedSnapshot of several processes."""

    @property
    def step(self) -> int: ...

    def write(self, folder: Path) -> None: ...


class Saver:
    """`saved` is called with the folder of each complete checkpoint, in the thread that trains.

    agree: whether a value is true in all processes
    """

    def __init__(
        self, run: Run, keep: int, background: bool, saved: Callable[[Path], None], agree: Callable[[bool], bool] = bool
    ):
        self.run, self.keep, self.background, self.saved, self.agree = run, keep, background, saved, agree
        self.pool = ThreadPoolExecutor(1, "save")
        self.pending: Future[Path] | None = None

    def save(self, snapshot: WritableState, sync_log: Callable[[], None]) -> None:
        self.wait()
        self.pending = self.pool.submit(self.write, snapshot, sync_log)
        if not self.background:
            self.wait()

    def write(self, snapshot: WritableState, sync_log: Callable[[], None]) -> Path:
        try:
            sync_log()  # a checkpoint is never newer than the log
            with self.run.saving(snapshot.step, self.keep) as folder:
                snapshot.write(folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} could not be written ({error}); the previous one is intact: "
                f"free disk space, then continue with: regard train --resume {self.run.path}"
            ) from error
        return self.run.checkpoint(snapshot.step)

    def poll(self) -> None:
        """Raise the error of a save that has failed."""
        if self.pending is not None and self.agree(self.pending.done()):
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self.pending is not None:
            try:
                folder = self.pending.result()
            finally:
                self.pending = None
            self.saved(folder)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # The first error is the one to report; a RuntimeError means that another process has ended.
        with nullcontext() if error is None else suppress(CheckpointError, RuntimeError):
            self.wait()
        self.pool.shutdown()
