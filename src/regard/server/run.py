"""Binding a port and leaving it well.

127.0.0.1 unless told otherwise; any other address needs a key. On SIGTERM or Ctrl-C the server takes no new connections
and lets running answers finish for `drain` seconds, then ends them with a last event; a second signal leaves at once.
"""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from regard.engine.engine import Engine
from regard.server.app import create_app
from regard.server.limits import LOCAL_HOSTS
from regard.server.service import Lens
from regard.server.worker import STOPPING
from regard.text.tokenizer import Tokenizer

GRACE = 5.0  # seconds for the last events to be sent once the drain is over


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    lens: Lens | None = None,
    drain: float = 30.0,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until a signal comes. `ready` is told the address once it answers; with port 0 a free one is taken."""
    local = check_address(host, key)
    app = create_app(engine, tokenizer, name, key=key, lens=lens, hosts=LOCAL_HOSTS if local else ())
    Server(app, host, port, drain, ready).run()


def check_address(host: str, key: str | None) -> bool:
    """Whether `host` is this machine only; if it is not, a key is required."""
    if host in LOCAL_HOSTS:
        return True
    if not key:
        raise ValueError(f"host={host!r} can be reached from other machines; set a key, or bind 127.0.0.1")
    return False


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, host: str, port: int, drain: float, ready: Callable[[str], None]):
        settings = uvicorn.Config(
            app, host, port, log_level="warning", server_header=False, timeout_graceful_shutdown=int(drain + GRACE)
        )
        super().__init__(settings)
        self.worker, self.drain, self.ready = app.state.service.worker, drain, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # uvicorn itself lets only a second SIGINT force the exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = asyncio.get_running_loop().call_later(self.drain, self.worker.cancel_all, STOPPING)
        await super().shutdown(sockets)
        end.cancel()
