"""HTTP requests as messages between the process with the HTTP server and its replicas.

A replica runs the whole application (app.py) on a forwarded request and returns the ASGI messages of its response, in
lists: all that are there when the last list has been taken, so that a fast stream needs few messages between processes.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
SCOPE += ("client", "server")  # what a server such as uvicorn sets; all of it can be pickled
USAGE = "regard.usage"  # type of the last message: the tokens of the request, for the access log


@dataclass(frozen=True)
class ForwardedRequest:
    scope: dict[str, Any]
    body: bytes
    conversation: str | None = None  # the requests of a conversation go to the same replica


def forwarded(scope: Scope, body: bytes, conversation: str | None) -> ForwardedRequest:
    return ForwardedRequest({name: scope[name] for name in SCOPE if name in scope}, body, conversation)


async def respond(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
    """The messages of the application's response. If the iteration is cancelled, the client has disconnected."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    disconnected = asyncio.Event()
    unread: Message | None = {"type": "http.request", "body": request.body, "more_body": False}

    async def receive() -> Message:
        nonlocal unread
        message, unread = unread, None
        if message is None:
            await disconnected.wait()
            return {"type": "http.disconnect"}
        return message

    last: list[Message] = []  # the end of the response, which follows the usage: the client may close the connection

    async def send(message: Message) -> None:
        ends = message["type"] == "http.response.body" and not message.get("more_body", False)
        last.append(message) if ends else messages.put_nowait(message)

    scope = request.scope | {"state": {}}

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            for message in ({"type": USAGE, "usage": scope["state"].get("usage")}, *last, None):
                messages.put_nowait(message)

    task = asyncio.create_task(run())
    try:
        ended = False
        while not ended:
            taken = [await messages.get()]
            while not messages.empty():
                taken.append(messages.get_nowait())
            ended = taken[-1] is None
            if kept := [message for message in taken if message is not None]:
                yield kept
        await task
    finally:
        disconnected.set()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
