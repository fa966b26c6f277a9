"""Server-sent events, and noticing that nobody listens any more.

A stream is `data: JSON` blocks ending in `data: [DONE]`; a fault on the way is sent as one `error` block before it, for
the status 200 has long left. When the client goes away, streamed or not, the work behind it is cancelled.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from regard.server.errors import ApiError
from regard.server.generation import GenerationTask

GONE = 499  # nobody reads it; it marks the answers that clients did not wait for in the metrics


class StreamedResponse(Protocol):
    """One generation in the shape of its route: as chunks while it grows, or whole."""

    generation: GenerationTask

    def chunks(self) -> AsyncIterator[dict]: ...

    def whole(self) -> dict: ...


async def respond(request: Request, stream: bool | None, answer: StreamedResponse) -> Response:
    if stream:
        return EventStream(answer.chunks(), on_close=answer.generation.cancel)
    try:
        done = await while_connected(request, answer.generation.finish())
    finally:
        answer.generation.cancel()
    return JSONResponse(answer.whole()) if done else Response(status_code=GONE)


class EventStream(StreamingResponse):
    """`on_close` runs once the stream has ended, was cut off or failed."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict], on_close: Callable[[], None]):
        super().__init__(events(chunks), headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self.on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_close()


async def events(chunks: AsyncIterator[dict]) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield event(chunk)
            await asyncio.sleep(0)  # a full queue must not keep the loop from noticing that the client has left
    except ApiError as error:
        yield event(error.body())
    yield "data: [DONE]\n\n"


def event(data: dict) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Await `work`, but drop it as soon as the client disconnects; whether it was done."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        gone.cancel()


async def disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
