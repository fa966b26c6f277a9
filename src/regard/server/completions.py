"""POST /v1/completions: the continuation of a prompt, with log-probabilities as parallel lists (`tokens`, …)."""

import secrets
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from regard.server.generation import GenerationTask, TextDelta
from regard.server.logprobs import completion_logprobs
from regard.server.response_schema import Completion, or_stream
from regard.server.responses import data_events, respond
from regard.server.schema import CompletionBody
from regard.server.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def router(served: ServedModel) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", responses=or_stream(Completion))
    async def completions(body: CompletionBody, request: Request) -> Response:
        served.check_name(body.model)
        prompts = [await served.encode(p) if isinstance(p, str) else p for p in body.prompts]
        generation = await served.generate(body, prompts, body.logprobs or 0, DEFAULT_MAX_TOKENS, continues_prompt=True)
        return await respond(request, body.stream, CompletionResponse(body, generation, served))

    return routes


class CompletionResponse:
    def __init__(self, body: CompletionBody, generation: GenerationTask, served: ServedModel):
        self.request, self.generation, self.tokenizer = body, generation, served.tokenizer
        self.header = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def choice(self, index: int, text: str, deltas: list[TextDelta], finish: str | None = None) -> dict:
        logprobs = None if self.request.logprobs is None else completion_logprobs(deltas, self.tokenizer)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def echo(self, prompt: list[int]) -> str:
        return self.tokenizer.decode(prompt) if self.request.echo else ""

    def body(self) -> dict:
        choices = [
            self.choice(choice.index, self.echo(choice.prompt) + choice.text, choice.deltas, choice.finish)
            for choice in self.generation.choices
        ]
        return self.header | {"choices": choices, "usage": self.generation.usage()}

    def events(self) -> AsyncIterator[str]:
        return data_events(self.chunks())

    async def chunks(self) -> AsyncIterator[dict]:
        if self.request.echo:
            for choice in self.generation.choices:
                yield self.header | {"choices": [self.choice(choice.index, self.echo(choice.prompt), [])]}
        async for delta in self.generation:
            yield self.header | {"choices": [self.choice(delta.index, delta.text, [delta], delta.finish)]}
        if self.request.include_usage:
            yield self.header | {"choices": [], "usage": self.generation.usage()}
