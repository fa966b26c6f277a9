"""The directory of a run that several processes train: the main process changes its files, and all agree on them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from regard.training.parallel.checkpoint import agree, write_together
from regard.training.parallel.mesh import Processes
from regard.training.run import Run, step_of

NO_CHECKPOINT = -1


class SharedRun(Run):
    """All processes call the same methods in the same order. A checkpoint may be saved by another thread."""

    def __init__(self, path: str | Path, processes: Processes):
        super().__init__(path)
        self.processes, self.savers = processes, processes.in_background()

    def by_main(self, action: Callable[[], object]) -> None:
        """Run the action in the main process; if it raises an error, all processes raise one."""
        error = None
        if self.processes.is_main:
            try:
                action()
            except Exception as failure:
                error = failure
        agree(error, self.processes, f"the main process failed in {self.path}; see its error")

    @contextmanager
    def locked(self) -> Generator[None]:
        with ExitStack() as stack:
            self.by_main(lambda: stack.enter_context(super(SharedRun, self).locked()))
            yield

    @contextmanager
    def saving(self, step: int, keep: int) -> Generator[Path]:
        with write_together(self.checkpoint(step), super().saving(step, keep), self.savers) as folder:
            yield folder

    def writing(self, name: str) -> AbstractContextManager[Path]:
        return write_together(self.path / name, super().writing(name), self.processes)

    def latest(self, note: Callable[[str], None] = print, folders: Sequence[Path] | None = None) -> Path | None:
        """The main process compares the files with their sums; the others take its result."""
        found: list[Path | None] = []
        self.by_main(lambda: found.append(super(SharedRun, self).latest(note, folders)))
        folder = found[0] if found else None
        step = self.processes.from_main(NO_CHECKPOINT if folder is None else step_of(folder))
        return None if step == NO_CHECKPOINT else self.checkpoint(step)

    def discard_after(self, step: int) -> None:
        self.by_main(lambda: super(SharedRun, self).discard_after(step))

    def delete_after(self, step: int) -> None:
        self.by_main(lambda: super(SharedRun, self).delete_after(step))


class NoLog:
    """The log in processes other than the main one."""

    def __enter__(self) -> "NoLog":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, record: Mapping[str, Any]) -> None:
        pass

    def sample(self, step: int, text: str) -> None:
        pass

    def sync(self) -> None:
        pass

    def roll_back(self, step: int) -> None:
        pass
