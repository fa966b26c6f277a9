"""Models that are loaded or verified. Both take long, so they run in threads of their own, one model at a time each.

A request starts the work, and later requests read its state (`Work`).
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from regard.engine.async_engine import SHUTTING_DOWN
from regard.server.adapter_routes import FOLDERS
from regard.server.errors import ApiError, shutting_down
from regard.server.model_registry import ModelRegistry
from regard.server.model_schema import LawTable, Verification, Work
from regard.server.served_model import ServedModel
from regard.server.worker_thread import WorkerThread

log = logging.getLogger(__name__)
NO_MEMORY = "there is not enough memory; unload a model first, or choose a smaller one"
OUT_OF_MEMORY = ("out of memory", "allocate memory")  # in the messages of torch's RuntimeErrors


class Library(Protocol):
    """The models that can be opened. Dictionaries have the fields of the bodies in model_schema.py. Methods raise
    LookupError for a model that is not listed, ValueError for what cannot be done."""

    def available(self, served: Collection[str]) -> list[dict[str, Any]]: ...

    def choices(self) -> dict[str, list[str]]: ...

    def find(self, model: str) -> object: ...

    def open(self, model: str, taken: Collection[str]) -> ServedModel: ...

    def plan(
        self, model: str, context: int | None, batch: int, dtype: str, weights: str | None, device: str | None
    ) -> dict[str, Any]: ...

    def verify(self, model: str, on_law: Callable[[str, str, int], None]) -> dict[str, Any]: ...


class Stopped(Exception):
    """The work was stopped by a client, or because the server is shutting down."""


class ModelLoader:
    def __init__(self, models: ModelRegistry, library: Library):
        self.models, self.library, self.thread = models, library, WorkerThread("loading")
        self.work: Work | None = None  # the current one, or the last

    def start(self, model: str) -> None:
        """Load a model and add it to the registry; 409 if another one is being loaded."""
        if self.models.draining:
            raise shutting_down(SHUTTING_DOWN)
        if self.work is not None and self.work.state == "running":
            raise ApiError(409, f"{self.work.model} is being loaded; wait for it", code="busy", param="model")
        self.work = Work(model=model, state="running")
        self._task = asyncio.create_task(self._run(self.work))

    async def _run(self, work: Work) -> None:
        with failures(work):
            served = await self.thread.run(self.library.open, work.model, self.models.names)
            if self.models.draining:
                raise Stopped(SHUTTING_DOWN)
            self.models.add(served)
            work.name, work.state = served.name, "done"


class ModelVerifier:
    def __init__(self, models: ModelRegistry, library: Library):
        self.models, self.library, self.thread = models, library, WorkerThread("verify")
        self.current = Verification(work=None, table=None)  # or the last
        self._stop = threading.Event()  # of the current verification

    def start(self, model: str) -> None:
        """Check the laws of a model; 409 if another one is being verified."""
        running = self.current.work
        if running is not None and running.state == "running":
            raise ApiError(409, f"{running.model} is being verified; wait for it, or stop it", code="busy")
        work, self._stop = Work(model=model, state="running"), threading.Event()
        self.current = Verification(work=work, table=None)
        self._task = asyncio.create_task(self._run(self.current, work, self._stop))

    def stop(self) -> None:
        """End the current verification with its next law."""
        self._stop.set()

    async def _run(self, verification: Verification, work: Work, stop: threading.Event) -> None:
        def on_law(law: str, dtype: str, total: int) -> None:
            if self.models.draining or stop.is_set():
                raise Stopped("it was stopped")
            work.done, work.total, work.now = work.done + (work.total is not None), total, f"{law} ({dtype})"

        with failures(work):
            verification.table = LawTable(**await self.thread.run(self.library.verify, work.model, on_law))
            work.done, work.state = work.total or 0, "done"


@contextmanager
def failures(work: Work) -> Generator[None]:
    """Record why work fails. It has no caller that could handle an exception: clients read the state of the work."""
    try:
        yield
    except (ApiError, ValueError, LookupError, OSError, Stopped) as error:
        work.error, work.state = public_text(error), "failed"
    except Exception as error:  # else the state would stay "running", and no other model could be loaded
        work.error, work.state = NO_MEMORY, "failed"
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in OUT_OF_MEMORY):
            log.exception("%s: loading or verifying failed", work.model)
            work.error = "it failed; the server's log has the details"


def public_text(error: Exception) -> str:
    """The message of an error without the folders of files: clients do not learn where they are."""
    return without_folders(str(error.args[0] if isinstance(error, LookupError) and error.args else error))


def without_folders(text: str) -> str:
    return FOLDERS.sub("", text)
