"""The id of a request: the client's X-Request-Id, or a new one. Every response has it as a header.

It is in the access log and in the log of failures, so that a client's report can be found there. A proxy forwards it
with the headers of the request. The state of a request has its id and, once the response starts, its status.
"""

import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
# Others are replaced: an id is written to logs, where a newline or a quote could forge a line.
VALID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class RequestId:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        sent = Headers(scope=scope).get(HEADER, "")
        id = sent if VALID.fullmatch(sent) else f"req_{secrets.token_hex(12)}"
        MutableHeaders(scope=scope)[HEADER] = id
        state = scope.setdefault("state", {})
        state["request_id"] = id

        def act(start: Message) -> None:
            MutableHeaders(scope=start)[HEADER] = id
            state["status"] = start["status"]

        await self.app(scope, receive, on_start(send, act))


def on_start(send: Send, act: Callable[[Message], None]) -> Send:
    """A `send` that calls `act` with the start of the response, which has its status and headers, before it is sent."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            act(message)
        await send(message)

    return sending


def request_id(request: Request) -> str:
    return getattr(request.state, "request_id", "-")
