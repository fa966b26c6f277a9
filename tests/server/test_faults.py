"""Faults of clients and of single requests, against a server with a real engine: neighbours are not affected, and
nothing is left."""

import asyncio
import copy
import json
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores.paged import Paged
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.server.app import create_app
from regard.server.run_server import Server
from regard.server.served_model import ServedModel
from regard.text.train import byte
from tests.laws import randomize_weights

NAN, FAILS, NO_MEMORY = 250, 251, 252  # ids with which a prompt makes the model fail
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def model():
    block = Block((Sublayer(Attention(heads=4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
    model = Decoder(vocab=261, width=32, layers=(Repeat((block,), 2),), context=128, tied=False).build(seed=3).double()
    randomize_weights(model, seed=3)
    return model.eval().requires_grad_(False)


def texts_alone(model, prompts: list[list[int]]) -> list[str]:
    """The greedy continuations of these prompts, each in an engine of its own."""
    sampling = Sampling(max_new=16, temperature=0)
    generated = (Engine(model, rows=1, store="contiguous").generate(ids, sampling) for ids in prompts)
    return [byte().decode([token.id for token in tokens]) for tokens in generated]


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    """A server in this event loop, and its client."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = Server(create_app([ServedModel("tiny", byte(), engine)]), "127.0.0.1", 0, 1.0, ready.set_result)
    serving = asyncio.create_task(server._serve())  # `serve` would install handlers of signals
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=await ready, timeout=60, limits=limits) as client:
        yield client
    server.should_exit = True
    await serving


async def read_stream(client: httpx.AsyncClient, ids: list[int], events: int | None = None) -> str:
    """The text of a stream; the client disconnects after this many events."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=GREEDY | {"prompt": ids, "stream": True}) as response:
        assert response.status_code == 200
        lines = (line async for line in response.aiter_lines() if line)
        async for line in lines:
            if line == "data: [DONE]":
                return text
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if events is not None and (events := events - 1) < 0:
                return text
    raise AssertionError("the stream ended without a last event")


def test_two_hundred_streams_of_which_half_are_cut_leave_nothing(model) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(20)]
    expected = texts_alone(model, prompts)
    engine = Engine(model, rows=12, queue=188, store=partial(Paged, block=4, blocks=80))

    async def run() -> list[str]:
        async with running(engine) as client:
            await read_stream(client, [1, 2, 3])
            await until(lambda: engine.idle)
            before = left_behind()
            cuts = [rng.randint(0, 5) if i % 2 else None for i in range(200)]
            streams = [read_stream(client, prompts[i % 20], cut) for i, cut in enumerate(cuts)]
            texts = await asyncio.gather(*streams)
            await until(lambda: engine.idle)
            await until(lambda: left_behind() == before)
        return [
            text == expected[i % 20] if cut is None else expected[i % 20].startswith(text)
            for i, (cut, text) in enumerate(zip(cuts, texts, strict=True))
        ]

    assert all(asyncio.run(run()))
    metrics = engine.metrics()
    assert metrics["free_blocks"] == metrics["blocks"] and metrics["running"] == metrics["waiting"] == 0
    assert metrics["cancelled"] > 20 and metrics["preemptions"] > 0 and metrics["error"] == 0
    engine.store.check()


@pytest.fixture
def failing_model(model):
    """The model, which fails on prompts with certain ids: with NaN, with an error, and with too little memory."""
    model = copy.deepcopy(model)
    model.embedding.weight[NAN] = torch.nan
    model.head.weight[[NAN, FAILS, NO_MEMORY]] = 0  # never the most likely tokens

    def record_tokens(module, inputs) -> None:
        model.current_tokens = inputs[0]

    def fail(module, inputs) -> None:  # in the last layer, after earlier ones have written their states
        if (model.current_tokens == FAILS).any():
            raise RuntimeError("a secret address: 0xdeadbeef")
        if (model.current_tokens == NO_MEMORY).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")

    model.embedding.register_forward_pre_hook(record_tokens)
    model.stack.blocks[-1].sublayers[-1].body.register_forward_pre_hook(fail)
    return model


BAD = {  # change of the body: status, part of the message
    "a bad token": ({"prompt": [3, 9999]}, 400, "the prompt has id 9999"),
    "a prompt that does not fit": ({"prompt": [3] * 200}, 400, "exceed this model's 128 tokens"),
    "a bad grammar": ({"structured_outputs": {"grammar": "root ::= ("}}, 400, "the grammar is refused"),
    "no output": ({"structured_outputs": {"grammar": "root ::= root"}}, 400, "matches the grammar"),
    "an unknown token": ({"logit_bias": {"9999": 1}}, 400, "id 9999 cannot be biased"),
    "logits that are not finite": ({"prompt": [3, NAN, 4]}, 500, "the engine failed on this request"),
    "an error in the forward": ({"prompt": [3, FAILS]}, 500, "the engine failed on this request"),
    "out of memory": ({"prompt": [NO_MEMORY, 5, 6]}, 500, "the engine failed on this request"),
}


def test_a_bad_request_fails_alone(failing_model) -> None:
    """Each bad request comes twice, streamed and not, while others are decoded."""
    engine = Engine(failing_model, rows=5, queue=99, chunk=32, store=partial(Paged, block=4, blocks=60))
    prompts = [[i, 7 * i % 250, 3] * (i % 7 + 1) for i in range(24)]
    expected = texts_alone(failing_model, prompts)

    async def run() -> None:
        async with running(engine) as client:
            streams = [asyncio.create_task(read_stream(client, ids)) for ids in prompts]
            for change, status, message in BAD.values():
                body = GREEDY | {"prompt": [1, 2]} | change
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == status and message in response.text, response.text
                streamed = await client.post("/v1/completions", json=body | {"stream": True})
                assert streamed.status_code == (400 if status == 400 else 200)
                assert message in streamed.text and (status == 400 or streamed.text.endswith("data: [DONE]\n\n"))
            assert await asyncio.gather(*streams) == expected
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())
    metrics = engine.metrics()
    assert metrics["free_blocks"] == metrics["blocks"] and metrics["running"] == metrics["waiting"] == 0
    assert metrics["error"] == 2 * sum(status == 500 for _, status, _ in BAD.values())


def left_behind() -> tuple[int, int, int]:
    """The numbers of tasks, threads and open files."""
    return len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/dev/fd"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
