"""No request blocks the event loop for long. What is measured is the CPU time of its thread, not the wall clock."""

import asyncio
import gc
import json
import threading
import time

import httpx
import pytest
from starlette.responses import JSONResponse

from regard.server.app import create_app
from regard.server.served_model import ServedModel
from tests.server.fake_engine import FakeEngine
from tests.server.test_bad_input import CHAT, COMPLETION

LONGEST = 0.1  # seconds per callback
SIZE = 1_000_000  # bytes of a body, just below the limit
MESSAGE = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}


def many(item: object) -> list:
    return [item] * (SIZE // (len(json.dumps(item)) + 2))


EXTREME = {
    "prompts of one id": ("/v1/completions", COMPLETION | {"prompt": many([1])}),
    "empty prompts": ("/v1/completions", COMPLETION | {"prompt": many([])}),
    "string prompts": ("/v1/completions", COMPLETION | {"prompt": many("")}),
    "ids": ("/v1/completions", COMPLETION | {"prompt": many(1)}),
    "large ids": ("/v1/completions", COMPLETION | {"prompt": [many(2**40)]}),
    "ids and a string": ("/v1/completions", COMPLETION | {"prompt": [*many(1)[:-5], "a"]}),
    "mixed prompts": ("/v1/completions", COMPLETION | {"prompt": many({"a": [None, 1.5, {"b": True}]})}),
    "stop strings": ("/v1/completions", COMPLETION | {"stop": many("x")}),
    "stop numbers": ("/v1/completions", COMPLETION | {"stop": many(1)}),
    "unknown fields": ("/v1/completions", COMPLETION | {f"{i:x}": 0 for i in range(SIZE // 13)}),
    "logit bias": ("/v1/completions", COMPLETION | {"logit_bias": {f"{i:x}": "" for i in range(SIZE // 13)}}),
    "deep lists": ("/v1/completions", b"[" * SIZE),
    "deep objects": ("/v1/completions", b'{"a":' * (SIZE // 5)),
    "deep prompt": ("/v1/completions", b'{"model":"tiny","prompt":' + b"[" * 900 + b"]" * 900 + b"}"),
    "digits": ("/v1/completions", b'{"model":"tiny","prompt":[' + b",".join([b"9" * 4000] * 240) + b"]}"),
    "messages": ("/v1/chat/completions", CHAT | {"messages": many(MESSAGE)}),
    "empty messages": ("/v1/chat/completions", CHAT | {"messages": many({})}),
    "wrong messages": ("/v1/chat/completions", CHAT | {"messages": many(1)}),
    "parts": ("/v1/chat/completions", CHAT | {"messages": [MESSAGE | {"content": many(PART)}]}),
    "wrong parts": ("/v1/chat/completions", CHAT | {"messages": [MESSAGE | {"content": many({})}]}),
    "messages of parts": ("/v1/chat/completions", CHAT | {"messages": [MESSAGE | {"content": [PART] * 36}] * 900}),
    "messages of wrong parts": (
        "/v1/chat/completions",
        CHAT | {"messages": [MESSAGE | {"content": [{}] * 200}] * 1024},
    ),
    "metadata": ("/v1/chat/completions", CHAT | {"metadata": {f"{i:x}": 0 for i in range(SIZE // 13)}}),
    "modalities": ("/v1/chat/completions", CHAT | {"modalities": many("audio")}),
    "embeddings": ("/v1/embeddings", {"model": "tiny", "input": many("x")}),
    "wrong embeddings": ("/v1/embeddings", {"model": "tiny", "input": many({})}),
    "documents": ("/v1/rerank", {"model": "tiny", "query": "x", "documents": many("x")}),
    "tokens": ("/detokenize", {"tokens": many(2**30)}),
    "items": ("/v1/responses", {"model": "tiny", "input": many(MESSAGE)}),
    "wrong items": ("/v1/responses", {"model": "tiny", "input": many({})}),
    "items of parts": ("/v1/responses", {"model": "tiny", "input": [MESSAGE | {"content": [{}] * 200}] * 1024}),
    "a long text": ("/regard/tokenize", {"text": "\n" * (SIZE // 2)}),
}


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_bodies_are_refused_at_once(tokenizer, monkeypatch, name):
    path, body = EXTREME[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert len(content) < 1 << 20
    run = asyncio.Handle._run
    longest = 0.0

    def timed_run(handle: asyncio.Handle) -> None:
        nonlocal longest
        start = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - start)

    async def post() -> httpx.Response:
        app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, "x"))])
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            url, headers = f"http://127.0.0.1{path}", {"content-type": "application/json"}
            await client.post(url, content=b"{}", headers=headers)  # the first request imports modules
            monkeypatch.setattr(asyncio.Handle, "_run", timed_run)
            # in a new task, whose callbacks are timed from their start
            return await asyncio.create_task(client.post(url, content=content, headers=headers))

    for _ in range(3):  # other processes on the machine make it longer, never shorter
        longest = 0.0
        gc.collect()
        gc.freeze()  # as the server does
        try:
            response = asyncio.run(post())
        finally:
            gc.unfreeze()
            monkeypatch.undo()
        assert response.status_code == 400 and response.json()["error"]["message"]
        if longest < LONGEST:
            return
    pytest.fail(f"the event loop was blocked for {longest:.3f} s")


def test_a_long_response_is_encoded_outside_of_the_event_loop(tokenizer, monkeypatch):
    threads, render = [], JSONResponse.render

    def recorded(self, content):
        threads.append(threading.current_thread())
        return render(self, content)

    monkeypatch.setattr(JSONResponse, "render", recorded)

    async def post(tokens: int) -> httpx.Response:
        app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, "again", repeat=True))])
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), timeout=60) as client,
        ):
            body = COMPLETION | {"max_tokens": tokens, "n": 2, "logprobs": 5}
            return await client.post("http://127.0.0.1/v1/completions", json=body)

    for tokens in (10, 600):
        assert asyncio.run(post(tokens)).json()["usage"]["completion_tokens"] == 2 * tokens
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
