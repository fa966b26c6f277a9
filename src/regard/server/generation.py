"""The generation of one HTTP request: its choices, decoded in one batch, as a stream of text deltas.

    body ─ engine_requests ─▶ [(ids, Sampling)] ─ submit ─▶ AsyncEngine ─ Token ─▶ TextStream ─▶ TextDelta

A token may release no text yet (a part of a character, the beginning of a stop string), so a delta holds all the tokens
that its text comes from. A stop string ends its choice and cancels the engine's request.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from regard.engine.async_engine import (
    AsyncEngine,
    DeadlinePassed,
    EngineStopped,
    Failure,
    RequestHandle,
    ShuttingDown,
    Submit,
)
from regard.engine.grammar import Grammar
from regard.engine.request import PromptEmbeddings, QueueFull, RequestOptions, Sampling, Token, derived_seed
from regard.server.errors import ApiError, shutting_down
from regard.server.metrics import RequestMetrics
from regard.server.schema import SamplingBody, SchedulingBody
from regard.text.detokenizer import TextStream
from regard.text.tokenizer import Tokenizer

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos",
)  # fmt: skip


class RouteOptions(NamedTuple):
    """What a route decides beside the body of its request."""

    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    default_max_tokens: int | None = None
    continues_prompt: bool = False  # the text of a choice continues the text of its prompt, unlike an answer in a chat
    grammar: Grammar | None = None
    tenant: str = ""  # one of the server's keys, if it has several
    stop_ids: tuple[int, ...] = ()  # besides those of the tokenizer
    embeddings: PromptEmbeddings | None = None  # of the prompt with images


class TextDelta(NamedTuple):
    index: int  # of the choice
    offset: int  # of the text in the choice's text
    text: str
    tokens: list[Token]
    finish: str | None
    stop: Token | None = None  # the stop token, which has no text

    @property
    def all_tokens(self) -> list[Token]:
        return self.tokens if self.stop is None else [*self.tokens, self.stop]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.all_tokens]


@dataclass
class Choice:
    """One continuation while it is generated."""

    index: int
    handle: RequestHandle
    prompt: list[int]
    stream: TextStream
    text: str = ""
    deltas: list[TextDelta] = field(default_factory=list)
    prompt_only: bool = False  # only the log-probabilities of the prompt are asked for: its token is dropped
    first_token: float = 0.0  # time.monotonic()
    token_count: int = 0  # includes the stop token
    _pending: list[Token] = field(default_factory=list)  # tokens whose text is held back

    @property
    def finish(self) -> str | None:
        finish = self.stream.finish
        return "length" if finish and self.prompt_only else finish

    @property
    def mean_logprob(self) -> float:
        """Per token, by which the best of several samples is chosen."""
        logprobs = [token.logprob for delta in self.deltas for token in delta.tokens]
        return sum(logprobs) / max(1, len(logprobs))

    @property
    def prompt_logprobs(self) -> list[Token]:
        """Of the tokens of the prompt after the first; complete once there is a token."""
        return [] if self.handle.request is None else self.handle.request.prompt_logprobs

    def push(self, token: Token) -> TextDelta | None:
        """The delta that this token completes, or None while its text is held back."""
        self.first_token = self.first_token or time.monotonic()
        text = self.stream.push(token)
        if self.prompt_only:
            return TextDelta(self.index, 0, "", [], self.finish)
        self.token_count += 1
        if token.finish != "stop":
            self._pending.append(token)
        if not text and not self.finish:
            return None
        stop = token if token.finish == "stop" else None
        delta = TextDelta(self.index, len(self.text), text, self._pending, self.finish, stop)
        self.text, self._pending = self.text + text, []
        self.deltas.append(delta)
        return delta


class GenerationTask:
    """Iterate over it for the text deltas; always call `cancel` at the end.

    `continues_prompt`: the text of a choice continues the text of its prompt, in contrast to an answer in a chat.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        requests: list[tuple[list[int], Sampling]],
        stops: list[str],
        continues_prompt: bool,
        metrics: RequestMetrics,
        options: RequestOptions | None = None,
        submit: Submit | None = None,
        prompt_only: bool = False,
    ):
        """submit: used in place of the `submit` of the engine. prompt_only: no token is returned."""
        self.engine, self.metrics = engine, metrics
        self.events: asyncio.Queue[tuple[int, Token | Failure]] = asyncio.Queue()
        self.choices = [
            Choice(
                index,
                RequestHandle(ids, sampling, partial(self._enqueue, index), submit, options),
                ids,
                TextStream(tokenizer, stops, prompt_ids=ids if continues_prompt else ()),
                prompt_only=prompt_only,
            )
            for index, (ids, sampling) in enumerate(requests)
        ]

    def _enqueue(self, index: int, event: Token | Failure) -> None:
        self.events.put_nowait((index, event))

    async def submit(self) -> None:
        """Submit the requests of all choices to the engine, or none."""
        try:
            with submission_errors():
                await self.engine.submit([choice.handle for choice in self.choices])
        except asyncio.CancelledError:  # the client disconnected while the requests were being submitted
            self.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        unfinished = set(range(len(self.choices)))
        while unfinished:
            index, event = await self.events.get()
            choice = self.choices[index]
            if index not in unfinished:  # tokens that the engine produced after a stop string was found
                continue
            if isinstance(event, Failure):
                raise request_failed(event)
            if (delta := choice.push(event)) is not None:
                yield delta
                if not self.events.empty():  # otherwise the next `get` waits
                    await asyncio.sleep(0)  # lets the event loop handle a disconnect
            if choice.finish:
                unfinished.remove(index)
                self.engine.cancel(choice.handle)
                self.metrics.observe(choice.handle, choice.first_token, choice.token_count)

    async def wait(self) -> None:
        async for _ in self:
            pass

    def cancel(self) -> None:
        for choice in self.choices:
            self.engine.cancel(choice.handle)

    def usage(self) -> dict[str, Any]:
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}  # n choices share one prompt
        prompt, completion = sum(prompts.values()), sum(choice.token_count for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens()},
        }

    def cached_tokens(self) -> int:
        """The tokens of the prompts that came from the prefix cache. Of n choices the first computes the prompt."""
        reused: dict[int, int] = {}
        for choice in self.choices:
            found = 0 if choice.handle.request is None else choice.handle.request.reused
            reused[id(choice.prompt)] = min(reused.get(id(choice.prompt), found), found)
        return sum(reused.values())


def request_options(body: SchedulingBody, tenant: str) -> RequestOptions:
    """What a request asks of the scheduler. Tenants share no cached prefixes, and cannot overtake each other."""
    if tenant and (body.priority or 0) < 0:
        message = f"priority={body.priority} would overtake other keys; send 0, or more to let others go first"
        raise ApiError(400, message, code="invalid_value", param="priority")
    salt = "\0".join(part for part in (tenant, body.cache_salt) if part)
    return RequestOptions(salt=salt, priority=body.priority or 0, tenant=tenant, deadline=body.timeout)


@contextmanager
def submission_errors() -> Generator[None]:
    """Raises the errors of a submission to the engine as ApiError."""
    try:
        yield
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"}) from error
    except EngineStopped as error:
        raise shutting_down(str(error)) from error
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from error


def request_failed(failure: Failure) -> ApiError:
    match failure:
        case DeadlinePassed():
            return ApiError(408, str(failure), code="timeout", param="timeout")
        case ShuttingDown():
            return shutting_down(str(failure))
        case _:
            return ApiError(500, str(failure), code="engine_error")


def engine_requests(
    body: SamplingBody,
    prompts: list[list[int]],
    lengths: list[int],
    capacity: int,
    stop_ids: tuple[int, ...],
    options: RouteOptions,
) -> list[tuple[list[int], Sampling]]:
    """The ids and sampling of the requests for each prompt.

    If neither max_tokens nor a default is set, a request may fill the capacity. lengths: how many of the engine's
    `capacity` tokens each prompt takes.
    """
    fields = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    bias = {int(id): value for id, value in (body.logit_bias or {}).items()}
    requests = []
    for ids, length in zip(prompts, lengths, strict=True):
        max_new = max_new_tokens(length, body.max_tokens, capacity, options.default_max_tokens)
        for i in range(body.samples):
            seed = derived_seed(body.seed, i)  # n different choices from one seed
            try:
                sampling = Sampling(
                    **fields, max_new=max_new, min_new=body.min_tokens or 0, seed=seed, stop_ids=stop_ids,
                    logit_bias=bias, top_logprobs=options.top_logprobs, prompt_logprobs=options.prompt_logprobs,
                    grammar=options.grammar,
                )  # fmt: skip
            except ValueError as error:
                raise ApiError(400, str(error), code="invalid_value") from error
            requests.append((ids, sampling))
    return requests


def max_new_tokens(prompt_length: int, max_tokens: int | None, capacity: int, default: int | None) -> int:
    if prompt_length == 0:
        raise ApiError(400, "the prompt has no tokens; send some text", code="empty_prompt", param="prompt")
    max_tokens = 1 if max_tokens == 0 else max_tokens  # the engine always generates one, which is dropped
    available, needed = capacity - prompt_length, max_tokens or 1
    if available < needed:
        message = f"{prompt_length} prompt tokens and {needed} new ones exceed this model's {capacity} tokens"
        raise ApiError(400, f"{message}; shorten the prompt or lower max_tokens", code="context_length_exceeded")
    return max_tokens or min(available, default or available)
