"""Jobs of synchronous callers: sequences of requests that are decoded together, by the caller's own steps.

A job has one request at a time. When it needs no more tokens of it, the next request is submitted, if there is one, as
soon as the queue has space.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from regard.engine.engine import Engine
from regard.engine.request import GenerationError, QueueFull, Request


class Job(Protocol):
    def submit(self) -> Request:
        """Submit the next request. If the queue is full (QueueFull), it is called again after a step."""
        ...

    def read(self, request: Request) -> bool:
        """Read the new tokens of the request. Returns whether it needs no more of them."""
        ...

    @property
    def finished(self) -> bool:
        """Whether there is no next request."""
        ...


def run_jobs(engine: Engine, lock: AbstractContextManager, jobs: Sequence[Job]) -> None:
    """Run all jobs to their ends. If one fails, all are cancelled. lock: held during every call to the engine."""
    waiting, running = deque(jobs), dict[Request, Job]()
    try:
        while waiting or running:
            with lock:
                try:
                    while waiting:
                        running[waiting[0].submit()] = waiting[0]
                        waiting.popleft()
                except QueueFull:
                    pass  # continue after a step
                engine.step()
            for request, job in list(running.items()):
                if request.finish not in (None, "stop", "length"):
                    raise GenerationError(request.error or request.finish)
                if job.read(request):
                    del running[request]
                    with lock:
                        engine.cancel(request)  # no effect unless it was to generate more
                    if not job.finished:
                        waiting.append(job)
    finally:
        with lock:
            for request in running:
                engine.cancel(request)
