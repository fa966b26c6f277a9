"""One thread for the work of a kind of requests beside the engine's, with a bounded number of requests."""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from regard.server.errors import ApiError

MAX_REQUESTS = 8  # that run or wait


class WorkerThread:
    def __init__(self, name: str, limit: int = MAX_REQUESTS):
        self.name, self.limit, self.requests = name, limit, 0
        self._thread = ThreadPoolExecutor(1, f"regard-{name}")

    def stop(self) -> None:
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

    async def run(self, function: Callable, *args: Any) -> Any:
        """The result of `function(*args)`, a part of the work of a request; requests take turns."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
