"""One thread owns the engine; asyncio talks to it through an inbox.

The engine is synchronous and not thread-safe, so every call to it (submit, cancel, step, reading its metrics, a lens
pass over the same weights) runs here, between two steps. Tokens travel back with `loop.call_soon_threadsafe`.

    asyncio ── inbox (deque + condition) ──▶ thread: inbox, step, inbox, step …, sleep when idle
    asyncio ◀── Ticket.deliver(token) ────── thread
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling, Token
from regard.server.errors import ApiError

log = logging.getLogger(__name__)

STOPPING = "the server is shutting down"
ENGINE_FAILED = "the engine failed on this request; the server's log has the details"


class Failure(str):
    """Delivered in place of a token when a request ends without an answer: the reason."""


def stopped() -> ApiError:
    return ApiError(503, STOPPING, code="shutting_down", headers={"retry-after": "5"})


class Ticket:
    """One request as the asyncio side holds it, made before it is submitted so that it can always be cancelled."""

    def __init__(self, ids: Sequence[int], sampling: Sampling, deliver: Callable[[Token | Failure], None]):
        self.ids, self.sampling = ids, sampling
        self.request: Request | None = None
        self._deliver, self._loop = deliver, asyncio.get_running_loop()

    def deliver(self, event: Token | Failure) -> None:
        self._loop.call_soon_threadsafe(self._deliver, event)


class Worker:
    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._closed = False
        self._tickets: dict[Request, Ticket] = {}  # those running; only the thread touches it
        self._thread = threading.Thread(target=self._work, name="regard-engine", daemon=True)

    # the asyncio side

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; requests still running get a Failure."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    async def submit(self, tickets: list[Ticket]) -> None:
        """All or none. Raises what `engine.submit` raises: ValueError for a bad request, QueueFull."""
        await self.run(self._submit, tickets)

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request, finished or not, submitted or not; its tokens stop coming."""
        self._post(lambda: self._cancel(ticket))

    def cancel_all(self, reason: str) -> None:
        self._post(lambda: self._fail(reason))

    async def run(self, function: Callable, *args: Any) -> Any:
        """`function(*args)` on the engine's thread, between two steps."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if answer.cancelled():
                return
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        def call() -> None:
            try:
                if self._stopping:
                    raise stopped()
                result, error = function(*args), None
            except Exception as raised:  # not swallowed: it is raised again where `run` is awaited
                result, error = None, raised
            loop.call_soon_threadsafe(settle, result, error)

        if not self._post(call):
            raise stopped()
        return await answer

    def _post(self, call: Callable[[], None]) -> bool:
        """Whether the thread will make the call; it has none to cancel and none to answer once it is closed."""
        with self._wake:
            if not self._closed:
                self._inbox.append(call)
                self._wake.notify()
            return not self._closed

    # the engine's thread

    def _work(self) -> None:
        try:
            while not self._stopping:
                with self._wake:
                    while not self._inbox and self.engine.idle and not self._stopping:
                        self._wake.wait()
                self._read_inbox()
                if not self._stopping and not self.engine.idle:
                    self._step()
        finally:  # nobody may wait for a thread that is gone
            with self._wake:
                self._stopping = self._closed = True
            self._fail(STOPPING)
            self._read_inbox()

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _step(self) -> None:
        try:
            produced = self.engine.step()
        except Exception:  # the step's requests fail; the server and later requests go on
            log.exception("a step of the engine failed; its %d requests are ended", len(self._tickets))
            return self._fail(ENGINE_FAILED)
        for request, token in produced:
            if request in self._tickets:
                self._tickets[request].deliver(token)
        for request, ticket in list(self._tickets.items()):
            if request.finish in ("error", "cancelled"):
                log.error("a request failed: %s", request.error or request.finish)
                ticket.deliver(Failure(ENGINE_FAILED))
            if request.finish is not None:
                del self._tickets[request]

    def _submit(self, tickets: list[Ticket]) -> None:
        try:
            for ticket in tickets:
                ticket.request = self.engine.submit(ticket.ids, ticket.sampling)
                self._tickets[ticket.request] = ticket
        except Exception:
            for ticket in tickets:
                self._cancel(ticket)
            raise

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.request in self._tickets:
            del self._tickets[ticket.request]
            self.engine.cancel(ticket.request)

    def _fail(self, reason: str) -> None:
        for ticket in list(self._tickets.values()):
            ticket.deliver(Failure(reason))
            self._cancel(ticket)
