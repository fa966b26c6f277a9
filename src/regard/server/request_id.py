"""The id of a request: the client's X-Request-Id, or a new one. Every response has it as a header.

It is in the access log and in the log of failures, so that a client's report can be found there. A proxy forwards it
with the headers of the request.
"""

import re
import secrets

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
        scope.setdefault("state", {})["request_id"] = id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = id
            await send(message)

        await self.app(scope, receive, send_with_id)


def request_id(request: Request) -> str:
    return getattr(request.state, "request_id", "-")
