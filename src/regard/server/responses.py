"""The response to a generation request: one JSON body, or server-sent events.

A failure after the first event is sent as an event with an `error`, because the status 200 has already been sent. If
the client disconnects, its generation is cancelled.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from regard.server.errors import ApiError

MAX_TOKENS_IN_LOOP = 1000  # more are formatted in a thread: with log-probabilities it takes seconds
CLIENT_CLOSED_REQUEST = 499  # never sent; counts disconnected clients in the metrics

T = TypeVar("T")


class Generation(Protocol):
    """GenerationTask, or SpeechTask."""

    async def wait(self) -> None: ...

    def cancel(self) -> None: ...

    def usage(self) -> dict[str, Any]: ...


class ResponseFormat(Protocol):
    """A generation in the format of its route."""

    request: Any  # the body

    @property
    def generation(self) -> Generation: ...

    def events(self) -> AsyncIterator[str]:
        """The events of a stream."""
        ...

    def body(self) -> dict | str:
        """The JSON body, or the plain text, of a finished generation."""
        ...


async def respond(request: Request, stream: bool | None, response: ResponseFormat) -> Response:
    request.state.body, request.state.generation = response.request, response.generation  # for traces

    def close() -> None:
        response.generation.cancel()
        request.state.usage = response.generation.usage()  # for the access log

    if stream:
        return EventStream(response.events(), on_close=close)
    try:
        finished = await run_until_disconnect(request, response.generation.wait())
    finally:
        close()
    if not finished:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    tokens = response.generation.usage()["total_tokens"]  # those of the prompt may be echoed
    return await format_tokens(tokens, lambda: complete_response(response.body()))


def complete_response(body: dict | str) -> Response:
    return PlainTextResponse(body) if isinstance(body, str) else JSONResponse(body)


async def format_tokens(tokens: int, format: Callable[[], T]) -> T:
    """The result of `format`, which formats this many tokens: in a thread if they would block the event loop."""
    return format() if tokens <= MAX_TOKENS_IN_LOOP else await asyncio.to_thread(format)


class EventStream(StreamingResponse):
    """`on_close` is called once the stream has ended, failed or was disconnected."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]):
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self.on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_close()


async def data_events(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """The chunks of completions, chats and transcriptions, each an `event`, and at the end `data: [DONE]`."""
    try:
        async for chunk in chunks:
            yield chunk
    except ApiError as error:
        yield event(error.body())
    yield "data: [DONE]\n\n"


def event(data: dict) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n"


def error_event(error: ApiError) -> dict:
    """The last event of a failed stream of /v1/responses."""
    detail = error.body()["error"]
    return {"type": "error", **{key: detail[key] for key in ("code", "message", "param")}}


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Await `work`, but cancel it if the client disconnects. Returns whether it finished."""
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        disconnected.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
