"""Limits for connections and log lines, so that clients that only hold connections do not stop the server.

A connection must send its whole request within `request_timeout` seconds. It is closed if a response waits longer than
`send_timeout` seconds for the client to read. At most `max_connections` are open, well below the limit of file
descriptors: if asyncio reaches that limit, it logs a traceback for each failed `accept` and tries again. If there is
one more, the connection that has waited longest for a request is closed; if all of them have a request, the new one is
refused with 503.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 256  # connections that asyncio accepts at once, before their protocols can refuse them
OTHER_FILES = 100  # file descriptors besides those of connections
MAX_CONNECTIONS = 4096
REQUEST_TIMEOUT = 30.0
SEND_TIMEOUT = 60.0
REFUSAL = b'{"error":{"message":"all connections of the server are in use; try again later","type":"server_error",'
REFUSAL += b'"param":null,"code":"too_many_connections"}}'
REFUSAL_HEAD = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
REFUSAL_HEAD += b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(REFUSAL)


def default_max_connections() -> int:
    """Half of the file descriptors that this process may open, but at most MAX_CONNECTIONS.

    If these are few, BACKLOG more connections and OTHER_FILES must fit beside them.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 256
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(limit // 8, 1, min(MAX_CONNECTIONS, limit // 2, limit - BACKLOG - OTHER_FILES))


class LimitedProtocol(H11Protocol):
    """`waiting` is shared by all connections: those without a complete request, the longest wait first."""

    def __init__(
        self,
        *args: Any,
        waiting: "OrderedDict[LimitedProtocol, None]",
        max_connections: int,
        request_timeout: float,
        send_timeout: float,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.waiting, self.max_connections, self.request_timeout = waiting, max_connections, request_timeout
        self.send_timeout = send_timeout
        self.request_timer: asyncio.TimerHandle | None = None
        self.send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # uvicorn narrows it too
        if len(self.connections) >= self.max_connections:
            if not self.waiting:
                self.transport = transport
                transport.write(REFUSAL_HEAD + REFUSAL)
                return transport.close()
            next(iter(self.waiting)).abort()
        super().connection_made(transport)
        self.update_waiting()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.update_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.update_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        self.stop_send_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:  # the client reads more slowly than the server writes
        super().pause_writing()
        self.send_timer = self.loop.call_later(self.send_timeout, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_send_timer()

    def stop_send_timer(self) -> None:
        if self.send_timer is not None:
            self.send_timer.cancel()
            self.send_timer = None

    def update_waiting(self) -> None:
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not incomplete or self.transport.is_closing():
            self.stop_waiting()
        elif self not in self.waiting:
            self.waiting[self] = None
            self.request_timer = self.loop.call_later(self.request_timeout, self.abort)

    def stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self.request_timer is not None:
            self.request_timer.cancel()
            self.request_timer = None

    def abort(self) -> None:
        self.stop_waiting()
        self.connections.discard(self)
        self.transport.abort()


class LogRateLimit(logging.Filter):
    """Passes `burst` records of each message per `seconds`; the first one of the next period tells how many were left
    out. Otherwise clients could fill the disk with log lines."""

    MAX_MESSAGES = 1000

    def __init__(self, burst: int = 10, seconds: float = 10.0):
        super().__init__()
        self.burst, self.seconds = burst, seconds
        self.periods: OrderedDict[str, tuple[float, int]] = OrderedDict()  # message: start of the period, records

    def filter(self, record: logging.LogRecord) -> bool:
        message, now = str(record.msg).partition("\n")[0], time.monotonic()
        start, count = self.periods.pop(message, (now, 0))
        left_out = max(0, count - self.burst)
        if now - start >= self.seconds:
            start, count = now, 0
            if left_out:
                record.msg = f"{record.msg}\n({left_out} more of this message were left out)"
        self.periods[message] = start, count + 1
        if len(self.periods) > self.MAX_MESSAGES:
            self.periods.popitem(last=False)
        return count < self.burst
