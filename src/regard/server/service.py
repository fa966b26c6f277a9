"""What the routes share: the model's name, its engine behind the worker, its tokenizer, and the optional lens."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regard.server.errors import ApiError
from regard.server.generation import Generation, plan
from regard.server.schema import Message, SamplingBody
from regard.server.worker import Worker
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer


class Lens(NamedTuple):
    """`maps(ids)`: per layer the (H, L, L) attention weights or None; `heads`: their number per layer, 0 for None."""

    maps: Callable[[Sequence[int]], list]
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

    async def encode(self, text: str) -> list[int]:
        return await self._on_text_thread(self._encode, text)

    async def encode_chat(self, messages: list[Message], reply: bool) -> list[int]:
        """The conversation as the model's template writes it; with `reply`, up to where the model speaks."""
        if self.tokenizer.chat_template is None:
            message = "this model has no chat template; use /v1/completions"
            raise ApiError(400, message, code="no_chat_template", param="messages")
        return await self._on_text_thread(encode_chat, self.tokenizer, [message.plain() for message in messages], reply)

    async def generate(
        self, body: SamplingBody, prompts: list[list[int]], top: int, unless_asked: int | None = None
    ) -> Generation:
        """Submitted to the engine, or refused with an ApiError."""
        jobs = plan(body, prompts, self.capacity, self.tokenizer.stops, top, unless_asked)
        generation = Generation(self.worker, self.tokenizer, jobs, body.stops)
        await generation.start()
        return generation

    def _encode(self, text: str) -> list[int]:
        start = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
        return start + self.tokenizer.encode(text)

    async def _on_text_thread(self, function: Callable[..., list[int]], *args: Any) -> list[int]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text_thread, function, *args)
        except ValueError as error:  # a character outside the vocabulary, messages that the template refuses
            raise ApiError(400, str(error), code="invalid_text") from error
