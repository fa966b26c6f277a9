"""No request blocks the event loop for long. What is measured is the CPU time of its thread, not the wall clock."""

import asyncio
import gc
import json
import threading
import time
from pkgutil import resolve_name

import httpx
import pytest
from starlette.responses import JSONResponse

from regard.server.app import create_app
from regard.server.served_model import ServedModel, TextEncoder
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, fake_embeddings
from tests.server.test_bad_input import CHAT, COMPLETION

LONGEST = 0.1  # seconds per callback; on a slow machine three times what json.loads takes for as many bytes
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
        text = json.dumps(many(1))
        start = time.thread_time()
        json.loads(text)
        limit = max(LONGEST, 3 * (time.thread_time() - start))
        gc.collect()
        gc.freeze()  # as the server does
        try:
            response = asyncio.run(post())
        finally:
            gc.unfreeze()
            monkeypatch.undo()
        assert response.status_code == 400 and response.json()["error"]["message"]
        if longest < limit:
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


def test_vectors_are_encoded_outside_of_the_event_loop(tokenizer, monkeypatch):
    threads, dumps = [], json.dumps

    def recorded(value, **options):
        if isinstance(value, list):
            threads.append(threading.current_thread())
        return dumps(value, **options)

    async def post() -> httpx.Response:
        app = create_app([ServedModel("tiny", tokenizer, encoder=TextEncoder(fake_embeddings))])
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client,
        ):
            return await client.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "bc"]})

    monkeypatch.setattr(json, "dumps", recorded)
    assert len(asyncio.run(post()).json()["data"]) == 2
    assert len(threads) == 2 and threading.main_thread() not in threads


@pytest.mark.parametrize("tokens", [10, 1500])
def test_a_long_chunk_of_a_stream_is_built_outside_of_the_event_loop(tokenizer, monkeypatch, tokens):
    """The echo of a prompt, and the last events of a response, which have the log-probabilities of all tokens."""
    threads = []

    def recorded(format):
        def call(deltas, tokenizer, *prompt):
            if len(deltas) > 1 or (prompt and prompt[0] is not None):  # not only a delta of the stream
                threads.append(threading.current_thread())
            return format(deltas, tokenizer, *prompt)

        return call

    for module, name in (("completions", "completion_logprobs"), ("responses_api", "chat_logprobs")):
        path = f"regard.server.{module}.{name}"
        monkeypatch.setattr(path, recorded(resolve_name(path)))
    echo = COMPLETION | {"prompt": [5] * tokens, "max_tokens": 1, "stream": True, "echo": True, "logprobs": 5}
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 5, "stream": True}
    answer = {"model": "tiny", "input": "hi", "max_output_tokens": tokens} | include

    async def post() -> list[str]:
        chat = Tokenizer(tokenizer.core, eos="<|end|>", chat_template=DEFAULT_TEMPLATE)
        app = create_app([ServedModel("tiny", chat, FakeEngine(tokenizer, "again", repeat=True))])
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), timeout=60, base_url="http://127.0.0.1") as client,
        ):
            bodies = [("/v1/completions", echo), ("/v1/responses", answer)]
            return [(await client.post(path, json=body)).text for path, body in bodies]

    completion, response = asyncio.run(post())
    assert json.loads(completion.split("\n\n")[0].removeprefix("data: "))["choices"][0]["logprobs"]["tokens"][1:]
    assert "response.incomplete" in response
    in_loop = [thread is threading.main_thread() for thread in threads]
    assert len(in_loop) >= 2 and all(in_loop) == (tokens < 1000) == any(in_loop)
