"""POST /v1/completions: the continuation of a prompt, with log-probabilities as parallel lists (`tokens`, …)."""

import secrets
import time
from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from regard.server.errors import ApiError
from regard.server.generation import Choice, GenerationTask, RouteOptions, TextDelta
from regard.server.logprobs import completion_logprobs
from regard.server.middleware import tenant_of
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import Completion, or_stream
from regard.server.responses import data_events, event, format_tokens, respond
from regard.server.schema import CompletionBody
from regard.server.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", responses=or_stream(Completion))
    async def completions(body: CompletionBody, request: Request) -> Response:
        served = models.find_for(body)
        served.check_queue()
        stop_ids: tuple[int, ...] = ()
        if body.suffix is not None:
            stop_ids, prompts = await served.encode_infilling([str(p) for p in body.prompts], body.suffix)
        else:
            prompts = [await served.encode(p) if isinstance(p, str) else p for p in body.prompts]
        prompt_logprobs = body.logprobs if body.echo else None
        if served.prompt_is_source and body.echo:
            message = "the output of an encoder-decoder does not continue the prompt, which is its source; omit echo"
            raise ApiError(400, message, code="echo_not_supported", param="echo")
        echoes = [await served.decode(ids, special=False) if body.echo else "" for ids in prompts]
        grammar = await served.grammar(body.structured_outputs)
        options = RouteOptions(
            body.logprobs or 0, prompt_logprobs, DEFAULT_MAX_TOKENS, True, grammar, tenant_of(request), stop_ids
        )
        generation = await served.generate(body, prompts, options)
        return await respond(request, body.stream, CompletionResponse(body, generation, served, echoes))

    return routes


class CompletionResponse:
    """echoes: the text of each prompt that precedes its continuations; empty without `echo`."""

    def __init__(self, body: CompletionBody, generation: GenerationTask, served: ServedModel, echoes: list[str]):
        self.request, self.generation, self.tokenizer = body, generation, served.tokenizer
        self.echoes = [echo for echo in echoes for _ in range(body.samples)]  # of each choice
        self.header = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def choice(
        self, index: int, text: str, deltas: list[TextDelta], finish: str | None = None, prompt: Choice | None = None
    ) -> dict:
        """`prompt`: the choice whose prompt precedes the deltas."""
        logprobs = None
        if self.request.logprobs is not None:
            echoed = None if prompt is None else (prompt.prompt, prompt.prompt_logprobs)
            with_ids = bool(self.request.return_token_ids)
            logprobs = completion_logprobs(deltas, self.tokenizer, echoed, len(self.echoes[index]), with_ids)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if self.request.return_token_ids:
            choice["token_ids"] = [id for delta in deltas for id in delta.ids]
        return choice

    def body(self) -> dict:
        choices = []
        for index, choice in enumerate(self.best_choices()):
            text, prompt = self.echoes[choice.index] + choice.text, choice if self.request.echo else None
            best = self.choice(choice.index, text, choice.deltas, choice.finish, prompt)
            choices.append(best | {"index": index} | self.prompt_ids(choice))
        return self.header | {"choices": choices, "usage": self.generation.usage()}

    def best_choices(self) -> list[Choice]:
        """For each prompt the n best of its samples, in the order of their mean log-probability."""
        choices, samples, n = self.generation.choices, self.request.samples, self.request.n or 1
        if samples == n:
            return choices
        groups = [choices[i : i + samples] for i in range(0, len(choices), samples)]
        return [c for group in groups for c in sorted(group, key=lambda c: -c.mean_logprob)[:n]]

    def events(self) -> AsyncIterator[str]:
        return data_events(self.chunks())

    async def chunks(self) -> AsyncIterator[str]:
        unechoed = set(range(len(self.generation.choices))) if self.request.echo else set()
        begun: set[int] = set()
        async for delta in self.generation:
            if delta.index in unechoed:  # only now: the log-probabilities of the prompt are known with the first token
                unechoed.remove(delta.index)
                choice = self.generation.choices[delta.index]
                yield await format_tokens(len(choice.prompt), partial(self.echo, choice))
            choice = self.choice(delta.index, delta.text, [delta], delta.finish)
            if delta.index not in begun:
                begun.add(delta.index)
                choice |= self.prompt_ids(self.generation.choices[delta.index])
            yield event(self.header | {"choices": [choice]})
        if self.request.include_usage:
            yield event(self.header | {"choices": [], "usage": self.generation.usage()})

    def prompt_ids(self, choice: Choice) -> dict:
        return {"prompt_token_ids": choice.prompt} if self.request.return_token_ids else {}

    def echo(self, choice: Choice) -> str:
        """The first event of a choice."""
        return event(
            self.header | {"choices": [self.choice(choice.index, self.echoes[choice.index], [], prompt=choice)]}
        )
