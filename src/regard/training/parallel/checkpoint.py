"""Checkpoints of a model that is distributed over processes; complete or absent, as those of one process.

    1. the main process creates the temporary folder
    2. all processes write their shares into it (sharded_files.py)
    3. the main process writes the manifest and renames the folder

Each step starts when all processes have finished the previous one. If one of them fails, for example because its disk
is full, all raise an error and nothing is committed. The run must be in a folder that all machines share.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from regard.checkpoint.atomic_folder import CheckpointError, hidden_sibling
from regard.training.parallel.mesh import Processes


@contextmanager
def write_together(path: Path, commit: AbstractContextManager[Path], processes: Processes) -> Generator[Path]:
    """A temporary folder that all processes fill; it becomes `path` if none of them raises an error.

    commit: `write_folder(path)`, entered by the main process only
    """
    error: BaseException | None = None
    with ExitStack() as stack:
        if processes.is_main:
            try:
                stack.enter_context(commit)
            except Exception as failure:
                error = failure
        folder = hidden_sibling(path, "partial")
        agree(error, processes, f"{path} cannot be written by the main process; see its error")
        missing = None if folder.is_dir() else CheckpointError(f"{folder} does not exist on this machine")
        agree(missing, processes, f"{path} must be in a folder that all machines share; choose another one")
        try:
            yield folder
        except Exception as failure:
            error = failure
        agree(error, processes, f"{path} was not saved, because another process failed; see its error")
        try:
            stack.close()  # the main process writes the manifest and renames the folder
        except Exception as failure:
            error = failure
    agree(error, processes, f"{path} was not saved by the main process; see its error")


def agree(error: Exception | None, processes: Processes, message: str) -> None:
    """Raise this process's error, or CheckpointError(message) if another process has one."""
    all_succeeded = processes.all_agree(error is None)
    if error is not None:
        raise error
    if not all_succeeded:
        raise CheckpointError(message)
