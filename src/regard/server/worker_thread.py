"""One thread for the work of a kind of requests beside the engine's, with bounds on the requests and their memory.

It ends when no work is left: its OpenMP threads, which end with it, would slow down the engine (`run_in_thread`).
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from regard.server.errors import ApiError, shutting_down

MAX_REQUESTS = 8  # that run or wait
STOPPED = "the model was removed from the server, or the server is shutting down"


class WorkerThread:
    def __init__(self, name: str, limit: int = MAX_REQUESTS, max_bytes: int = 0):
        """limit: requests that run or wait. max_bytes: that they may hold together."""
        self.name, self.limit, self.requests = name, limit, 0
        self.max_bytes, self.held_bytes = max_bytes, 0
        self._jobs, self._stopped, self._lock = 0, False, threading.Lock()
        self._thread = self._new_thread()

    def _new_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, f"regard-{self.name}")  # starts with the first job

    @property
    def busy(self) -> bool:
        """Whether requests or jobs run or wait; a job may run on after its client has left."""
        return self.requests > 0 or self._jobs > 0

    def stop(self) -> None:
        """Cancel the waiting jobs, and wait for the one that runs."""
        with self._lock:
            self._stopped = True
        self._thread.shutdown(cancel_futures=True)

    @contextmanager
    def request(self) -> Generator[None]:
        """Count a request; 429 if there are too many."""
        if self.requests >= self.limit:
            message = f"{self.limit} requests for the {self.name} run or wait already; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @contextmanager
    def hold(self, size: int) -> Generator[None]:
        """Count the bytes that a request keeps; 429 if there are too many. The only request may keep any number."""
        if self.held_bytes and self.held_bytes + size > self.max_bytes:
            held, limit = self.held_bytes >> 20, self.max_bytes >> 20
            message = f"other requests keep {held} of {limit} MiB for the {self.name}, and this one needs {size >> 20}"
            raise ApiError(429, f"{message}; try again later", code="queue_full", headers={"retry-after": "10"})
        self.held_bytes += size
        try:
            yield
        finally:
            self.held_bytes -= size

    async def run(self, function: Callable, *args: Any) -> Any:
        """The result of `function(*args)`, a part of the work of a request; requests take turns. 503 after `stop`."""
        with self._lock:
            if self._stopped:
                raise shutting_down(STOPPED)
            job = self._thread.submit(function, *args)
            self._jobs += 1
        job.add_done_callback(self._finish)
        return await asyncio.wrap_future(job)

    def _finish(self, job: Future) -> None:
        with self._lock:
            self._jobs -= 1
            if self._jobs == 0 and not self._stopped:  # `stop` calls this for waiting jobs, inside its own shutdown
                self._thread.shutdown(wait=False)
                self._thread = self._new_thread()


async def stop_all(*threads: WorkerThread) -> None:
    """Stop threads while the event loop runs on: their jobs may take minutes to end."""
    await asyncio.gather(*(asyncio.to_thread(thread.stop) for thread in threads))


def stopping(*threads: WorkerThread) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """The lifespan of a router whose requests use these threads."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[None, None]:
        yield
        await stop_all(*threads)

    return lifespan
