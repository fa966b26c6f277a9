"""Clients that hold connections without a request, against a real server with low limits."""

import json
import logging
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any, cast

import httpx
import pytest

from regard.server.app import create_app
from regard.server.connections import LimitedProtocol, LogRateLimit, default_max_connections
from regard.server.run_server import Server
from regard.server.served_model import ServedModel
from tests.server.conftest import wait_until
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
LONG = {"model": "tiny", "prompt": "Mira", "max_tokens": 4000, "stream": True}


@contextmanager
def running(tokenizer, **limits) -> Iterator[tuple[Server, FakeEngine, str, Callable[..., socket.socket]]]:
    """A server, its engine and URL, and a function that opens a connection and sends bytes."""
    engine, address = FakeEngine(tokenizer, "again and again", repeat=True), Queue()
    engine.step_seconds = 0.02  # a response takes more than a minute
    server = Server(create_app([ServedModel("tiny", tokenizer, engine)]), "127.0.0.1", 0, 0.05, address.put, **limits)
    thread = threading.Thread(target=server.run)
    thread.start()
    url = address.get(timeout=60)
    with ExitStack() as sockets:

        def connect(data: bytes, receive_buffer: int | None = None) -> socket.socket:
            host, port = url.removeprefix("http://").split(":")
            connection = sockets.enter_context(socket.socket())
            connection.settimeout(60)
            if receive_buffer is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.connect((host, int(port)))
            connection.sendall(data)
            return connection

        try:
            yield server, engine, url, connect
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"POST / HTTP/1.1\r\n" * 2])
def test_idle_connections_leave_room_for_requests(tokenizer, data):
    with running(tokenizer, max_connections=8) as (server, _, url, connect):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            idle = [connect(data) for _ in range(40)]
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            wait_until(lambda: len(server.server_state.connections) <= 8)
            for _ in range(20):  # the stream is not interrupted
                next(lines)
        assert sum(map(is_closed, idle)) >= 32


def limits(server: Server) -> dict[str, Any]:
    """Of the connections that are made from now on. A test lowers them when its well-behaved client is connected, which
    a busy machine may hold up for longer."""
    return cast("Any", server.config.http).keywords


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def test_a_new_connection_is_refused_if_all_others_have_requests(tokenizer):
    with running(tokenizer, max_connections=2) as (server, _, url, connect), ExitStack() as streams:
        lines = []
        for _ in range(2):
            stream = streams.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60))
            lines.append(stream.iter_lines())
            next(lines[-1])
        response = connect(b"").recv(4096)
        assert response.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in response
        streams.close()
        wait_until(lambda: not server.server_state.connections)
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize(
    "data",
    [b"", b"GET /health", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"],
)
def test_an_incomplete_request_is_closed(tokenizer, data):
    with running(tokenizer) as (server, engine, url, connect):
        engine.may_step.clear()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as stream:
            limits(server)["request_timeout"] = 0.1
            connection = connect(data)
            wait_until(lambda: is_closed(connection))
            engine.may_step.set()
            assert next(stream.iter_lines()).startswith("data: ")  # a complete request is not closed


def test_a_client_that_does_not_read_its_stream_is_closed(tokenizer, monkeypatch):
    """Neither does the stream stay in memory. A client that reads gets its whole stream, and its timer ends."""
    timers, pause = [], LimitedProtocol.pause_writing
    monkeypatch.setattr(LimitedProtocol, "pause_writing", lambda self: pause(self) or timers.append(self.send_timer))
    body = json.dumps(LONG | {"max_tokens": 1500}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    post += b"content-length: %d\r\n\r\n" % len(body) + body
    with running(tokenizer) as (server, engine, url, connect):
        engine.step_seconds = 0
        # accepted sockets have this buffer too, so that the kernel does not take the whole stream
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
        slow = connect(post, receive_buffer=1 << 13)
        wait_until(lambda: timers)
        limits(server)["send_timeout"] = 0.4
        idle = connect(post, receive_buffer=1 << 13)
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += slow.recv(1 << 14) or pytest.fail("the stream was cut")
        assert len(received) > 100_000
        wait_until(lambda: len(server.server_state.connections) == 1 and engine.idle)
        assert timers[0].cancelled()
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        rest = b""
        while data := idle.recv(1 << 14):
            rest += data
        assert rest and b"[DONE]" not in rest


def test_a_connection_is_kept_for_the_next_request(tokenizer):
    with running(tokenizer, max_connections=4) as (server, _, url, _), httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(3):
            assert client.get("/health").status_code == 200
        assert len(server.server_state.connections) == 1


def test_connections_are_limited_by_the_file_descriptors():
    """Half of them, or as many as fit beside the backlog and other files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for files, connections in ((1024, 512), (512, 156), (256, 32)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            assert default_max_connections() == connections
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_repeated_log_messages_are_limited(monkeypatch):
    now, limit = 0.0, LogRateLimit(burst=3, seconds=10)
    monkeypatch.setattr("regard.server.connections.time.monotonic", lambda: now)

    def passed(message: str, count: int) -> list[str]:
        records = [logging.makeLogRecord({"msg": message}) for _ in range(count)]
        return [record.getMessage() for record in records if limit.filter(record)]

    assert passed("accept failed", 1000) == ["accept failed"] * 3 and passed("other", 1) == ["other"]
    now = 11.0
    assert passed("accept failed", 1000)[0] == "accept failed\n(997 more of this message were left out)"
    for i in range(5000):
        passed(str(i), 1)
    assert len(limit.periods) == LogRateLimit.MAX_MESSAGES


SERVE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from regard.server.run_server import Server
from regard.text.train import byte
from tests.server.fake_engine import FakeEngine
app = create_app([ServedModel("tiny", byte(), FakeEngine(byte(), "x"))])
Server(app, "127.0.0.1", 0, 0.1, lambda url: print(url, flush=True)).run()
"""


@pytest.mark.slow
def test_half_open_connections_do_not_stop_a_process_with_few_descriptors():
    command = [sys.executable, "-c", SERVE]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process,
        ExitStack() as sockets,
    ):
        try:
            assert process.stdout is not None and process.stderr is not None
            url = process.stdout.readline().strip()
            host, port = url.removeprefix("http://").split(":")
            for _ in range(700):
                sockets.enter_context(socket.create_connection((host, int(port)), timeout=60)).sendall(b"GET / HTTP")
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        finally:
            process.terminate()
        assert process.stderr.read() == ""
