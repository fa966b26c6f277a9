"""From prompts to pieces of text: the choices of one HTTP request, decoded side by side.

    body ─ plan ─▶ [(ids, Sampling)] ─ start ─▶ worker ─ tokens ─▶ Detokenizer ─▶ Piece

A token may yield no text yet (half a character, the beginning of a stop string), so a piece carries all the tokens that
its text came from. A stop string found in the text ends its choice and cancels the request behind it.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from regard.engine.request import QueueFull, Sampling, Token
from regard.server.errors import ApiError
from regard.server.schema import SamplingBody
from regard.server.worker import Failure, Ticket, Worker
from regard.text.stream import Detokenizer
from regard.text.tokenizer import Tokenizer

FILTERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class TextDelta(NamedTuple):
    index: int  # of its choice
    offset: int  # where its text begins in the choice's
    text: str
    tokens: list[Token]
    finish: str | None


@dataclass
class Choice:
    """One continuation while it grows."""

    ticket: Ticket
    detokenizer: Detokenizer
    prompt: list[int]
    text: str = ""
    pieces: list[TextDelta] = field(default_factory=list)
    waiting: list[Token] = field(default_factory=list)  # tokens whose text is still held back
    count: int = 0  # of all tokens; the one that ends the text is in no piece
    finish: str | None = None

    def push(self, token: Token) -> str:
        """The text that this token releases; sets `finish` when it is the last."""
        self.count += 1
        text = ""
        if token.id not in self.ticket.sampling.stop_ids:
            self.waiting.append(token)
            text = self.detokenizer.push(token.id)
        if self.detokenizer.stopped:
            self.finish = "stop"
        elif token.finish is not None:
            text += self.detokenizer.finish()
            self.finish = "stop" if self.detokenizer.stopped else token.finish
        return text


class GenerationTask:
    """Iterate over it for pieces; call `cancel` in the end, whatever happened.

    `continues`: each choice is one text with its prompt, and no answer to it.
    """

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        jobs: list[tuple[list[int], Sampling]],
        stops: list[str],
        continues: bool,
    ):
        self.worker = worker
        self.events: asyncio.Queue[tuple[int, Token | Failure]] = asyncio.Queue()
        self.choices = [
            Choice(
                Ticket(ids, sampling, partial(self._arrived, index)),
                Detokenizer(tokenizer, stops, after=ids if continues else ()),
                ids,
            )
            for index, (ids, sampling) in enumerate(jobs)
        ]

    def _arrived(self, index: int, event: Token | Failure) -> None:
        self.events.put_nowait((index, event))

    async def start(self) -> None:
        """Hand all choices to the engine, or none."""
        try:
            await self.worker.submit([choice.ticket for choice in self.choices])
        except QueueFull as error:
            raise ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"}) from error
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        except asyncio.CancelledError:  # the client left while the engine was taking it in
            self.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        unfinished = set(range(len(self.choices)))
        while unfinished:
            index, event = await self.events.get()
            choice = self.choices[index]
            if index not in unfinished:  # tokens that were under way when a stop string was found
                continue
            if isinstance(event, Failure):
                raise ApiError(500, str(event), code="engine_error")
            text = choice.push(event)
            if text or choice.finish:
                piece = TextDelta(index, len(choice.text), text, choice.waiting, choice.finish)
                choice.text += text
                choice.pieces.append(piece)
                choice.waiting = []
                yield piece
            if choice.finish:
                unfinished.remove(index)
                self.worker.cancel(choice.ticket)

    async def finish(self) -> None:
        async for _ in self:
            pass

    def cancel(self) -> None:
        for choice in self.choices:
            self.worker.cancel(choice.ticket)

    def usage(self) -> dict[str, int]:
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}  # n choices share their prompt
        prompt, completion = sum(prompts.values()), sum(choice.count for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def plan(
    body: SamplingBody,
    prompts: list[list[int]],
    capacity: int,
    stop_ids: tuple[int, ...],
    top: int,
    unless_asked: int | None,
) -> list[tuple[list[int], Sampling]]:
    """The engine's jobs: `n` of each prompt; `unless_asked` new tokens by default (None: as many as fit)."""
    asked = {key: value for key in FILTERS if (value := getattr(body, key)) is not None}
    jobs = []
    for ids in prompts:
        max_new = fit(len(ids), body.max_tokens, capacity, unless_asked)
        for i in range(body.n or 1):
            seed = None if body.seed is None else (body.seed + i) % (1 << 63)  # one seed, yet n different choices
            try:
                jobs.append((ids, Sampling(**asked, max_new=max_new, seed=seed, stop_ids=stop_ids, top=top)))
            except ValueError as error:
                raise ApiError(400, str(error), code="invalid_value") from error
    return jobs


def fit(length: int, asked: int | None, capacity: int, unless_asked: int | None) -> int:
    """How many new tokens a prompt of `length` gets, in a model that holds `capacity`."""
    left = capacity - length
    if length == 0:
        raise ApiError(400, "the prompt has no tokens; send some text", code="empty_prompt", param="prompt")
    if left < (asked or 1):
        message = f"this model holds {capacity} tokens, but the prompt has {length} and {asked or 1} are to follow"
        raise ApiError(400, f"{message}; shorten the prompt or lower max_tokens", code="context_length_exceeded")
    return asked or min(left, unless_asked or left)
