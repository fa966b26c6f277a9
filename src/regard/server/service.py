"""What the routes share: the model's name, its engine behind the worker, its tokenizer, and the optional lens."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regard.server.errors import ApiError
from regard.server.generation import GenerationTask, plan
from regard.server.schema import Message, SamplingBody
from regard.server.worker import Worker
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer


class Lens(NamedTuple):
    """`maps(ids, layer=None)`: per layer, or for this one only, the (H, L, L) attention weights, None where there are
    none; `heads`: their number per layer."""

    maps: Callable[..., list]
    heads: tuple[int, ...]


@dataclass
class Service:
    name: str
    created: int
    worker: Worker
    tokenizer: Tokenizer
    lens: Lens | None
    # one thread for tokenizing: long texts must not hold up the event loop, and a tokenizer is not thread-safe
    _text_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "regard-text"))

    @property
    def capacity(self) -> int:
        return self.worker.engine.capacity

    async def start(self) -> None:
        self.worker.start()

    async def stop(self) -> None:
        await self.worker.stop()
        self._text_thread.shutdown()

    def check_model(self, name: str) -> None:
        if name != self.name:
            message = f"the model {name!r} does not exist here; this server has {self.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def check_length(self, characters: int) -> None:
        """Tokenizing takes its time: not for a text that could not fit if all its tokens were the longest."""
        if characters > self.capacity * self.tokenizer.longest:
            message = f"{characters} characters never fit into the {self.capacity} tokens of this model; shorten it"
            raise ApiError(400, message, code="context_length_exceeded")

    async def encode(self, text: str) -> list[int]:
        self.check_length(len(text))
        return await self._on_text_thread(self._encode, text)

    async def encode_chat(self, messages: list[Message], reply: bool) -> list[int]:
        """The conversation as the model's template writes it; with `reply`, up to where the model speaks."""
        if self.tokenizer.chat_template is None:
            message = "this model has no chat template; use /v1/completions"
            raise ApiError(400, message, code="no_chat_template", param="messages")
        plain = [message.plain() for message in messages]
        self.check_length(sum(len(message["content"]) for message in plain))
        return await self._on_text_thread(encode_chat, self.tokenizer, plain, reply)

    async def generate(
        self,
        body: SamplingBody,
        prompts: list[list[int]],
        top: int,
        unless_asked: int | None = None,
        continues: bool = False,
    ) -> GenerationTask:
        """Submitted to the engine, or refused with an ApiError."""
        jobs = plan(body, prompts, self.capacity, self.tokenizer.stops, top, unless_asked)
        generation = GenerationTask(self.worker, self.tokenizer, jobs, body.stops, continues)
        await generation.start()
        return generation

    def _encode(self, text: str) -> list[int]:
        return [*self.tokenizer.opening, *self.tokenizer.encode(text)]

    async def _on_text_thread(self, function: Callable[..., list[int]], *args: Any) -> list[int]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text_thread, function, *args)
        except ValueError as error:  # a character outside the vocabulary, messages that the template refuses
            raise ApiError(400, str(error), code="invalid_text") from error
