"""The text of requests to one engine, used from any thread and from asyncio.

A lock guards the engine, which is not thread-safe. In synchronous code, the caller that waits for its request steps the
engine; in asyncio a thread does (engine/async_engine.py). A step advances all requests, so that requests of different
callers are decoded in one batch.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

from regard.engine.async_engine import AsyncEngine, Failure, RequestHandle
from regard.engine.engine import Engine
from regard.engine.grammar import Grammar
from regard.engine.jobs import run_jobs
from regard.engine.request import (
    GenerationError,
    LogitsProcessor,
    Request,
    Sampling,
    Token,
    TokenSequences,
)
from regard.spec import suggest_name
from regard.text.detokenizer import TextStream

SAMPLING_FIELDS = [field.name for field in fields(Sampling) if field.name != "stop_ids"]


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments, and the name of a loaded adapter."""

    adapter: str | None
    max_new: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    top_logprobs: int
    typical_p: float
    min_new: int
    ignore_eos: bool
    stop_sequences: TokenSequences
    bad_words: TokenSequences
    logit_bias: Mapping[int, float]
    processors: tuple[LogitsProcessor, ...]
    grammar: Grammar | None


def checked_sampling(options: SamplingOptions, stop_ids: tuple[int, ...]) -> Sampling:
    fields: dict[str, Any] = {name: value for name, value in options.items() if name != "adapter"}
    if unknown := [name for name in fields if name not in SAMPLING_FIELDS]:
        stops = "use stop (strings) or stop_sequences (token ids)"
        remedy = stops if unknown[0].startswith("stop") else suggest_name(unknown[0], SAMPLING_FIELDS)
        raise TypeError(f"there is no sampling option {unknown[0]!r}; {remedy}")
    return Sampling(stop_ids=stop_ids, **fields)


class Prompt(NamedTuple):
    """Ids with their sampling. `submit(ids, sampling)` submits them, `text_stream(request)` decodes the new tokens."""

    ids: list[int]
    sampling: Sampling
    submit: Callable[[Sequence[int], Sampling], Request]
    text_stream: Callable[[Request], TextStream]


class TextGenerator:
    def __init__(self, engine: Engine):
        self.engine, self.lock = engine, threading.RLock()

    def submit(self, prompt: Prompt) -> Request:
        with self.lock:
            return prompt.submit(prompt.ids, prompt.sampling)

    def cancel(self, request: Request) -> None:
        with self.lock:
            self.engine.cancel(request)

    def stream(self, request: Request, text: TextStream) -> Iterator[tuple[Token, str]]:
        """Every token of a submitted request, with the text that it completes."""
        position = 0  # of the next token to yield
        try:
            while True:
                while position < len(request.new) and text.finish is None:
                    token = request.new[position]
                    position += 1
                    yield token, text.push(token)
                if request.finish is not None or text.finish is not None:
                    break
                with self.lock:
                    if request.finish is None and position == len(request.new):  # else another caller has stepped
                        self.engine.step()
        finally:
            self.cancel(request)
        if request.error is not None:
            raise GenerationError(request.error)

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """The texts of all prompts, decoded together. If one fails, all are cancelled."""
        return [job.text for job in self.run(prompts)]

    def run(self, prompts: Sequence[Prompt]) -> "list[TextJob]":
        jobs = [TextJob(prompt) for prompt in prompts]
        run_jobs(self.engine, self.lock, jobs)
        return jobs

    # For asyncio

    @cached_property
    def thread(self) -> AsyncEngine:
        """The engine's thread, started on first use. It ends when this object is deleted, or the interpreter exits."""
        thread = AsyncEngine(self.engine, lock=self.lock)
        thread.start()
        weakref.finalize(self, thread.close)
        return thread

    async def stream_async(self, prompt: Prompt) -> AsyncGenerator[tuple[Token, str]]:
        """Submit a prompt, as soon as the queue has space, and yield its tokens with the text that each completes."""
        events: asyncio.Queue[Token | Failure] = asyncio.Queue()
        handle = RequestHandle(prompt.ids, prompt.sampling, events.put_nowait, prompt.submit)
        try:
            await self.thread.submit_when_free(handle)
            assert handle.request is not None
            text = prompt.text_stream(handle.request)
            while text.finish is None:
                event = await events.get()
                if isinstance(event, Failure):
                    raise GenerationError(handle.request.error or event)
                yield event, text.push(event)
        finally:
            self.thread.cancel(handle)

    async def generate_async(self, prompts: Sequence[Prompt]) -> list[str]:
        async def text_of(prompt: Prompt) -> str:
            return "".join([text async for _, text in self.stream_async(prompt)])

        tasks = [asyncio.ensure_future(text_of(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one fails, the others are cancelled
                task.cancel()


class TextJob:
    """The text of a prompt, generated by one request."""

    finished = True  # there is no second request

    def __init__(self, prompt: Prompt):
        self.prompt, self.text, self.position = prompt, "", 0
        self.stream: TextStream | None = None

    @property
    def cut_off(self) -> bool:
        """Whether it ended because it became too long."""
        return self.stream is not None and self.stream.finish == "length"

    def submit(self) -> Request:
        request = self.prompt.submit(self.prompt.ids, self.prompt.sampling)
        self.stream = self.prompt.text_stream(request)
        return request

    def read(self, request: Request) -> bool:
        """A stop string may end the text before the request."""
        assert self.stream is not None, "it has been submitted"
        while self.position < len(request.new) and self.stream.finish is None:
            self.text += self.stream.push(request.new[self.position])
            self.position += 1
        return request.finish is not None or self.stream.finish is not None
