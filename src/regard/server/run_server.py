"""Bind a port, and shut down without truncating responses.

The address is 127.0.0.1 by default; any other address requires a key. On SIGTERM or Ctrl-C the server accepts no new
connections and continues unfinished responses for `drain` seconds, then ends them with an error event. A second signal
exits at once.
"""

import asyncio
import gc
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn

from regard.engine.async_engine import SHUTTING_DOWN
from regard.server.app import create_app
from regard.server.connections import (
    BACKLOG,
    REQUEST_TIMEOUT,
    SEND_TIMEOUT,
    LimitedProtocol,
    LogRateLimit,
    default_max_connections,
)
from regard.server.middleware import LOCAL_HOSTS, MAX_BODY
from regard.server.served_model import ServedModel

GRACE = 5.0  # seconds after the drain, for sending the last events


def serve(
    models: Sequence[ServedModel],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | Sequence[str] | None = None,
    allow_hosts: tuple[str, ...] = (),
    allow_origins: tuple[str, ...] = (),
    access_log: bool = False,
    max_body: int = MAX_BODY,
    adapters: Path | None = None,
    drain: float = 30.0,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until a signal arrives. `on_ready` is called with the URL once the server accepts connections.

    Port 0 selects a free port. `allow_hosts`: host names that clients may use besides those of this machine; none for
    an address that other machines can reach: any name. `access_log` writes a line per request to stderr. For
    `models`, `allow_origins` and `adapters` see `create_app`.
    """
    hosts = host_names(host, key, allow_hosts)
    app = create_app(
        models, key=key, allow_hosts=hosts, allow_origins=allow_origins, access_log=access_log, max_body=max_body,
        adapters=adapters,
    )  # fmt: skip
    if access_log:
        log_access()
    Server(app, host, port, drain, on_ready).run()


def host_names(host: str, key: str | Sequence[str] | None, allow_hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The host names that a server at this address accepts; empty: any."""
    return (*LOCAL_HOSTS, *allow_hosts) if is_local(host, key) or allow_hosts else ()


def log_access() -> None:
    """Write the access log to stderr."""
    logger, handler = logging.getLogger("regard.access"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def is_local(host: str, key: str | Sequence[str] | None) -> bool:
    """Whether only this machine can connect to `host`. Raises ValueError if others can and there is no key."""
    if host in LOCAL_HOSTS:
        return True
    if not key:
        raise ValueError(f"host={host!r} can be reached from other machines; set a key, or bind 127.0.0.1")
    return False


class Server(uvicorn.Server):
    def __init__(
        self,
        app: Any,  # ASGI, with `state.models`, which are drained
        host: str,
        port: int,
        drain: float,
        on_ready: Callable[[str], None],
        max_connections: int | None = None,
        request_timeout: float = REQUEST_TIMEOUT,
        send_timeout: float = SEND_TIMEOUT,
    ):
        max_connections = max_connections or default_max_connections()
        protocol = partial(
            LimitedProtocol,
            waiting=OrderedDict(),
            max_connections=max_connections,
            request_timeout=request_timeout,
            send_timeout=send_timeout,
        )
        config = uvicorn.Config(
            app,
            host,
            port,
            http=cast("Any", protocol),
            ws="none",
            backlog=min(BACKLOG, max(32, max_connections // 2)),
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=int(drain + GRACE),
        )
        super().__init__(config)
        self.log_limit = LogRateLimit()
        self.models, self.drain, self.on_ready = app.state.models, drain, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for name in ("asyncio", "uvicorn.error"):
            logging.getLogger(name).addFilter(self.log_limit)
        gc.collect()
        gc.freeze()  # the collector no longer visits the model and the modules, which takes it 0.1 seconds
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # in uvicorn only a second SIGINT forces the exit; here also SIGTERM
        self.models.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self.drain, self.models.cancel_all, SHUTTING_DOWN)
        await super().shutdown(sockets)
        timer.cancel()
        for name in ("asyncio", "uvicorn.error"):
            logging.getLogger(name).removeFilter(self.log_limit)
