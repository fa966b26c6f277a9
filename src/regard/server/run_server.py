"""Bind a port, and shut down without truncating responses.

On SIGTERM or Ctrl-C the server accepts no new connections and continues unfinished responses for `drain` seconds, then
ends them with an error event. A second signal exits at once; a request whose response has not begun gets a 503.
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
from regard.server.errors import shutting_down
from regard.server.grounding import Grounding
from regard.server.model_work import Library
from regard.server.network_options import NetworkOptions
from regard.server.request_id import on_start
from regard.server.run_routes import Runs
from regard.server.served_model import ServedModel

GRACE = 5.0  # seconds after the drain, for sending the last events


def serve(
    models: Sequence[ServedModel],
    network: NetworkOptions,
    *,
    adapters: Path | None = None,
    runs: Runs | None = None,
    library: Library | None = None,
    grounding: Grounding | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until a signal arrives. `on_ready` is called with the URL once the server accepts connections.

    The access log, if there is one, is written to stderr. For the other arguments see `create_app`.
    """
    app = create_app(models, network, adapters=adapters, runs=runs, library=library, grounding=grounding)
    run(app, network, on_ready)


def run(app: Any, network: NetworkOptions, on_ready: Callable[[str], None]) -> None:
    """Serve an application, for which see `Server`, until a signal arrives."""
    if network.access_log:
        log_access()
    Server(app, network.host, network.port, network.drain, on_ready).run()


def log_access() -> None:
    """Write the access log to stderr."""
    logger, handler = logging.getLogger("regard.access"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class ShutdownResponse:
    """Middleware: a 503 for a request that is cancelled, by a second signal or a long drain, before its response."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: list[Message] = []
        try:
            await self.app(scope, receive, on_start(send, begun.append))
        except asyncio.CancelledError:
            if scope["type"] != "http" or begun:
                raise
            await shutting_down(SHUTTING_DOWN).response()(scope, receive, send)


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
            ShutdownResponse(app),
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

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        loggers = [logging.getLogger(name) for name in ("asyncio", "uvicorn.error")]
        for logger in loggers:
            logger.addFilter(self.passes_log)
        try:
            super().run(sockets)
        finally:
            for logger in loggers:
                logger.removeFilter(self.passes_log)

    def passes_log(self, record: logging.LogRecord) -> bool:
        """After a second signal nothing is logged: every aborted response would log a traceback."""
        return not self.force_exit and self.log_limit.filter(record)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
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
