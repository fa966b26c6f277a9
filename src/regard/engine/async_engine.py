"""The synchronous engine in a separate thread, used from asyncio.

The engine is not thread-safe, so every call to it (submit, cancel, step, metrics) and every lens pass over its model
runs in this thread, between two steps. Tokens return with `loop.call_soon_threadsafe`.

    asyncio ── inbox (deque + condition) ──▶ thread: calls, step, calls, step …; sleeps while idle
    asyncio ◀── RequestHandle.deliver ────── thread
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling, Token

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the engine is shutting down; send the request again later"
ENGINE_FAILED = "the engine failed on this request; the log has the details"
Submit = Callable[[Sequence[int], Sampling], Request]


class Failure(str):
    """The reason why a request failed, delivered in place of a token."""


class EngineStopped(RuntimeError):
    """The engine's thread has ended or is ending."""


class RequestHandle:
    """A request on the asyncio side. It exists before it is submitted, so that it can always be cancelled."""

    def __init__(self, ids: Sequence[int], sampling: Sampling, on_token: Callable[[Token | Failure], None]):
        self.ids, self.sampling = ids, sampling
        self.request: Request | None = None
        self._on_token, self._loop = on_token, asyncio.get_running_loop()

    def deliver(self, token: Token | Failure) -> None:
        self._loop.call_soon_threadsafe(self._on_token, token)


class AsyncEngine:
    def __init__(self, engine: Engine, submit: Submit | None = None):
        """submit: used in place of `Engine.submit`."""
        self.engine, self._engine_submit = engine, submit or engine.submit
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._closed = False
        self._running: dict[Request, RequestHandle] = {}  # used only in the thread
        self._thread = threading.Thread(target=self._run, name="regard-engine", daemon=True)

    # Called from asyncio

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; unfinished requests receive a Failure."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    async def submit(self, handles: list[RequestHandle]) -> None:
        """Submit all requests or none. Raises ValueError or QueueFull, as `Engine.submit` does."""
        await self.call(self._submit, handles)

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request; no effect if it is finished or was never submitted."""
        self._post(lambda: self._cancel(handle))

    def cancel_all(self, reason: str) -> None:
        self._post(lambda: self._fail_all(reason))

    async def call(self, function: Callable, *args: Any) -> Any:
        """The result of `function(*args)`, called in the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def resolve(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run_in_thread() -> None:
            try:
                if self._stopping:
                    raise EngineStopped(SHUTTING_DOWN)
                result, error = function(*args), None
            except Exception as raised:  # raised again where `call` is awaited
                result, error = None, raised
            loop.call_soon_threadsafe(resolve, result, error)

        if not self._post(run_in_thread):
            raise EngineStopped(SHUTTING_DOWN)
        return await future

    def _post(self, call: Callable[[], None]) -> bool:
        """Append a call to the inbox; False if the thread has ended and will not run it."""
        with self._wake:
            if not self._closed:
                self._inbox.append(call)
                self._wake.notify()
            return not self._closed

    # Called in the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                with self._wake:
                    while not self._inbox and self.engine.idle and not self._stopping:
                        self._wake.wait()
                self._run_inbox()
                if not self._stopping and not self.engine.idle:
                    self._step()
        finally:  # every pending call and request gets a result, even if an exception ends the thread
            with self._wake:
                self._stopping = self._closed = True
            self._fail_all(SHUTTING_DOWN)
            self._run_inbox()

    def _run_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _step(self) -> None:
        try:
            produced = self.engine.step()
        except Exception:  # the running requests fail; the server continues with later ones
            log.exception("a step of the engine failed; its %d running requests fail", len(self._running))
            return self._fail_all(ENGINE_FAILED)
        for request, token in produced:
            if request in self._running:
                self._running[request].deliver(token)
        for request, handle in list(self._running.items()):
            if request.finish in ("error", "cancelled"):
                log.error("a request failed: %s", request.error or request.finish)
                handle.deliver(Failure(ENGINE_FAILED))
            if request.finish is not None:
                del self._running[request]

    def _submit(self, handles: list[RequestHandle]) -> None:
        try:
            for handle in handles:
                handle.request = self._engine_submit(handle.ids, handle.sampling)
                self._running[handle.request] = handle
        except Exception:
            for handle in handles:
                self._cancel(handle)
            raise

    def _cancel(self, handle: RequestHandle) -> None:
        if handle.request in self._running:
            del self._running[handle.request]
            self.engine.cancel(handle.request)

    def _fail_all(self, reason: str) -> None:
        for handle in list(self._running.values()):
            handle.deliver(Failure(reason))
            self._cancel(handle)
