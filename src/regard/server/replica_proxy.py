"""The application of the process with the HTTP server, if replicas compute the responses.

It forwards a request to a replica and returns the messages of its response. If a replica ends while it computes a
response, the request is sent to another one; if a part of the response has been sent already, it ends with an error
event instead. The proxy itself answers GET /health, /ready (if a replica is) and /metrics (of all replicas).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple

from fastapi import APIRouter, FastAPI
from fastapi.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from regard.server.app import NO_TELEMETRY, guards
from regard.server.conversations import conversation_of
from regard.server.errors import ApiError, install_handlers, shutting_down
from regard.server.forwarding import USAGE, ForwardedRequest, forwarded
from regard.server.metrics import METRICS_TYPE, merge_metrics
from regard.server.network_options import NetworkOptions
from regard.server.request_id import RequestId
from regard.server.response_bodies import Status
from regard.server.responses import error_event, event, wait_for_disconnect

log = logging.getLogger(__name__)
Forward = Callable[[ForwardedRequest], AsyncGenerator[list[Message], None]]
ATTEMPTS = 4  # replicas that one request is sent to, if they end
RETRY_SECONDS = 0.2


class ReplicaEnded(Exception):
    """The replica ended, or cannot be reached, before its response was complete."""


def create_proxy_app(proxy: "ReplicaProxy", network: NetworkOptions, max_body: int) -> FastAPI:
    """Checks requests as `create_app` does, and forwards them. max_body: that of the replicas."""
    middleware = [Middleware(RequestId), *guards(network, max_body)]
    app = FastAPI(middleware=middleware, openapi_url=None, docs_url=None, redoc_url=None, telemetry=NO_TELEMETRY)
    install_handlers(app)
    app.state.models = proxy
    app.include_router(monitoring_routes(proxy))
    app.mount("", proxy)
    return app


def monitoring_routes(proxy: "ReplicaProxy") -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Status:
        """Whether this process works. Ray checks the replicas, and replaces them."""
        return Status(status="ok")

    @routes.get("/ready")
    async def ready() -> Status:
        if proxy.draining:
            raise ApiError(503, "the server is shutting down; use another one", code="not_ready")
        if not any(status.ready for status in await proxy.statuses()):
            raise ApiError(503, "no replica is ready; try again later", code="not_ready")
        return Status(status="ok")

    @routes.get("/metrics")
    async def metrics() -> PlainTextResponse:
        texts = {status.name: status.metrics for status in await proxy.statuses() if status.ready}
        names = map(str, range(proxy.replicas))
        return PlainTextResponse(merge_metrics({name: texts.get(name) for name in names}), media_type=METRICS_TYPE)

    return routes


class ReplicaStatus(NamedTuple):
    name: str  # "0" for the first replica
    ready: bool
    metrics: str


class ReplicaProxy:
    def __init__(self, forward: Forward, replicas: int, statuses: Callable[[], Awaitable[list[ReplicaStatus]]]):
        """forward: raises ReplicaEnded, or ApiError. statuses: of the replicas that answer in time."""
        self.forward, self.replicas, self.ask_statuses = forward, replicas, statuses
        self.asking: asyncio.Future[list[ReplicaStatus]] | None = None
        self.tasks: set[asyncio.Task] = set()
        self.stopping: str | None = None
        self.draining = False  # the server is shutting down and accepts no new connections

    def cancel_all(self, reason: str) -> None:
        """End all responses with an error."""
        self.stopping = reason
        for task in self.tasks:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server has no other connections"
        body = (await receive()).get("body", b"")  # BodyLimit has joined it
        response = ForwardedResponse(scope, send)
        conversation = conversation_of(body) if body else None
        task = asyncio.create_task(self.relay(forwarded(scope, body, conversation), response))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        self.tasks.add(task)
        try:
            await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # the client has disconnected
                task.cancel()
                await asyncio.wait({task})
            elif not task.cancelled():
                task.result()
            elif self.stopping is not None:
                await response.fail(shutting_down(self.stopping))
        finally:
            self.tasks.discard(task)
            for pending in (task, disconnect):
                pending.cancel()

    async def relay(self, request: ForwardedRequest, response: "ForwardedResponse") -> None:
        for attempt in range(ATTEMPTS):
            try:
                async with aclosing(self.forward(request)) as lists:
                    async for messages in lists:
                        await response.send(messages)
                return
            except ReplicaEnded as error:
                log.warning("a replica ended while it computed a response (%s)", error)
                if response.started:
                    break
                await asyncio.sleep(RETRY_SECONDS * 2**attempt)
            except ApiError as error:
                return await response.fail(error)
        message = "the replica that computed this response has ended; send the request again"
        await response.fail(ApiError(503, message, code="replica_ended", headers={"retry-after": "1"}))

    async def statuses(self) -> list[ReplicaStatus]:
        """Requests at the same time share one question to the replicas."""
        if self.asking is None or self.asking.done():
            self.asking = asyncio.ensure_future(self.ask_statuses())
        return await asyncio.shield(self.asking)


class ForwardedResponse:
    """The start of a response is sent with the first part of its body: until then another replica can answer."""

    def __init__(self, scope: Scope, send: Send):
        self.scope, self._send = scope, send
        self.start: Message | None = None
        self.started = False

    async def send(self, messages: list[Message]) -> None:
        for message in messages:
            if message["type"] == USAGE:
                self.scope.setdefault("state", {})["usage"] = message["usage"]
            elif message["type"] == "http.response.start":
                self.start = message
            else:
                await self.send_start()
                await self._send(message)

    async def send_start(self) -> None:
        if not self.started:
            assert self.start is not None, "a response starts before its body"
            self.started = True
            await self._send(self.start)

    async def fail(self, error: ApiError) -> None:
        """End the response with an error: its whole body, or the last event of a stream."""
        if not self.started:
            return await error.response()(self.scope, no_more, self._send)
        assert self.start is not None, "started"
        if not dict(self.start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
            raise ConnectionError("the response ended early")  # uvicorn closes the connection
        await self._send({"type": "http.response.body", "body": self.last_events(error).encode(), "more_body": False})

    def last_events(self, error: ApiError) -> str:
        if self.scope["path"] == "/v1/responses":
            return f"event: error\n{event(error_event(error))}"
        return event(error.body()) + "data: [DONE]\n\n"


async def no_more() -> Message:
    return {"type": "http.disconnect"}
