"""The synchronous engine in a separate thread, used from asyncio.

The engine is not thread-safe, so every call to it (submit, cancel, step, metrics) runs in this thread, between two
steps. The tokens of a step return with one `loop.call_soon_threadsafe`. Other threads may use the engine too, and step
it, if they hold the same lock.

    asyncio ── inbox (deque + condition) ─────▶ thread: calls, step, calls, step …; sleeps while idle
    asyncio ◀── (RequestHandle, Token) … ────── thread
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from regard.engine.engine import Engine
from regard.engine.request import QueueFull, Request, RequestOptions, Sampling, Token

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the engine is shutting down; send the request again later"
DEADLINE_PASSED = "the request was not finished before its deadline; allow more time, or ask for fewer tokens"
RETRY = 0.02  # seconds until a request that found the queue full is submitted again
ENGINE_FAILED = "the engine failed on this request; the log has the details"
Submit = Callable[..., Request]  # (ids, sampling, **RequestOptions)


class Failure(str):
    """The reason why a request failed, delivered in place of a token."""


class DeadlinePassed(Failure):
    """The failure of a request whose deadline has passed."""


class ShuttingDown(Failure):
    """The failure of a request that was not finished before the engine stopped."""


class EngineStopped(RuntimeError):
    """The engine accepts no requests any more: its thread has ended or is ending, or `cancel_all` was called."""


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
        loop.call_soon_threadsafe(function, *args)


class RequestHandle:
    """A request on the asyncio side. It exists before it is submitted, so that it can always be cancelled."""

    def __init__(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[Token | Failure], None],
        submit: Submit | None = None,
        options: RequestOptions | None = None,
    ):
        """submit: used in place of the `submit` of the AsyncEngine."""
        self.ids, self.sampling, self.submit, self.options = ids, sampling, submit, options or RequestOptions()
        self.request: Request | None = None
        self.created, self.started = time.monotonic(), None  # started: when the first step began that computed it
        self.delivered = 0  # tokens; used only in the engine's thread
        self.on_token, self.loop = on_token, asyncio.get_running_loop()

    def take_new(self, request: Request) -> list[Token | Failure]:
        """The tokens that were not delivered yet, and the failure of a failed request."""
        new: list[Token | Failure] = [*request.new[self.delivered :]]
        self.delivered += len(new)
        if request.finish == "timeout":
            new.append(DeadlinePassed(DEADLINE_PASSED))
        elif request.finish in ("error", "cancelled"):
            log.error("a request failed: %s", request.error or request.finish)
            new.append(Failure(ENGINE_FAILED))
        return new


Delivery = tuple[RequestHandle, Token | Failure]


def deliver(events: list[Delivery]) -> None:
    """Give events to their handles, by one call into each event loop: every call costs a system call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
    for event in events:
        by_loop.setdefault(event[0].loop, []).append(event)
    for loop, its_events in by_loop.items():
        call_in_loop(loop, call_handles, its_events)


def call_handles(events: list[Delivery]) -> None:
    for handle, event in events:
        handle.on_token(event)


class AsyncEngine:
    def __init__(self, engine: Engine, submit: Submit | None = None, lock: "threading.RLock | None" = None):
        """submit: used in place of `Engine.submit`. lock: held during every call to the engine."""
        self.engine, self._engine_submit = engine, submit or engine.submit
        self._lock = lock or threading.RLock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._closed = False
        self._refusal: str | None = None  # why `cancel_all` was called
        self._running: dict[Request, RequestHandle] = {}  # changed only in the thread
        self._posted = self._taken = 0  # requests, ever: given to the thread by asyncio; taken by the thread
        self._thread = threading.Thread(target=self._run, name="regard-engine", daemon=True)

    # Called from asyncio

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; unfinished requests receive a Failure."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """`stop`, from any thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return self._posted != self._taken or bool(self._running)

    def check_queue(self, count: int) -> None:
        """Raise QueueFull if there is no space for so many requests; at once, although a step may take seconds."""
        if self._posted - self._taken + len(self._running) + count > self.engine.max_requests:
            raise QueueFull("the queue of waiting requests is full; try again later")

    async def submit(self, handles: list[RequestHandle]) -> None:
        """Submit all requests or none. Raises EngineStopped, or ValueError or QueueFull, as `Engine.submit` does."""
        if self._stopping or self._refusal is not None:
            raise EngineStopped(self._refusal or SHUTTING_DOWN)
        self.check_queue(len(handles))
        with self._wake:  # several event loops may submit
            self._posted += len(handles)
        await self.call(self._submit, handles)

    async def submit_when_free(self, handle: RequestHandle) -> None:
        """Submit a request as soon as the queue has space."""
        while True:
            try:
                return await self.submit([handle])
            except QueueFull:
                await asyncio.sleep(RETRY)

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request; no effect if it is finished or was never submitted."""
        self._post(lambda: self._cancel(handle))
        self._notify()

    def cancel_all(self, reason: str) -> None:
        """Let all requests fail, and refuse later ones."""
        self._refusal = reason
        self._post(lambda: self._fail_all(ShuttingDown(reason)))
        self._notify()

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
            call_in_loop(loop, resolve, result, error)

        if not self._post(run_in_thread):
            raise EngineStopped(SHUTTING_DOWN)
        loop.call_soon(self._notify)  # after the callbacks that are ready: requests that arrive together start together
        return await future

    def _post(self, call: Callable[[], None]) -> bool:
        """Append a call to the inbox; False if the thread has ended and will not run it."""
        with self._wake:
            if not self._closed:
                self._inbox.append(call)
            return not self._closed

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # Called in the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                with self._wake:
                    while not self._inbox and not self._running and not self._stopping:
                        self._wake.wait()
                self._run_inbox()
                if not self._stopping and self._running:
                    self._step()
        finally:  # every pending call and request gets a result, even if an exception ends the thread
            with self._wake:
                failure = ShuttingDown(SHUTTING_DOWN) if self._stopping else Failure(ENGINE_FAILED)
                self._stopping = self._closed = True
            self._fail_all(failure)
            self._run_inbox()

    def _run_inbox(self) -> None:
        with self._lock:
            while self._inbox:
                self._inbox.popleft()()

    def _step(self) -> None:
        begin = time.monotonic()
        try:
            with self._lock:
                self.engine.step()
        except Exception:  # the running requests fail; the server continues with later ones
            log.exception("a step of the engine failed; its %d running requests fail", len(self._running))
            return self._fail_all(Failure(ENGINE_FAILED))
        events: list[Delivery] = []
        for request, handle in list(self._running.items()):
            if handle.started is None and (request.cached or request.new):
                handle.started = begin
            events += [(handle, event) for event in handle.take_new(request)]  # also those of steps in other threads
            if request.finish is not None:
                del self._running[request]
        deliver(events)

    def _submit(self, handles: list[RequestHandle]) -> None:
        self._taken += len(handles)
        try:
            for handle in handles:
                submit = handle.submit or self._engine_submit
                handle.request = submit(handle.ids, handle.sampling, **handle.options)
                self._running[handle.request] = handle
        except Exception:
            for handle in handles:
                self._cancel(handle)
            raise

    def _cancel(self, handle: RequestHandle) -> None:
        if handle.request in self._running:
            del self._running[handle.request]
            self.engine.cancel(handle.request)

    def _fail_all(self, failure: Failure) -> None:
        handles = list(self._running.values())
        with self._lock:
            for handle in handles:
                self._cancel(handle)
        deliver([(handle, failure) for handle in handles])
