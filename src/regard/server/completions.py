"""POST /v1/completions: plain continuation, with log-probabilities in the legacy lists (`tokens`, `text_offset`, …)."""

import secrets
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from regard.server.generation import GenerationTask, TextDelta
from regard.server.logprobs import legacy
from regard.server.schema import CompletionBody
from regard.server.service import Service
from regard.server.stream import respond

UNLESS_ASKED = 16  # OpenAI's default for max_tokens here


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        service.check_model(body.model)
        prompts = [await service.encode(p) if isinstance(p, str) else p for p in body.prompts]
        generation = await service.generate(body, prompts, body.logprobs or 0, UNLESS_ASKED, continues=True)
        return await respond(request, body.stream, CompletionResponse(body, generation, service))

    return routes


class CompletionResponse:
    def __init__(self, body: CompletionBody, generation: GenerationTask, service: Service):
        self.body, self.generation, self.tokenizer = body, generation, service.tokenizer
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

    def choice(self, index: int, text: str, pieces: list[TextDelta], finish: str | None = None) -> dict:
        logprobs = None if self.body.logprobs is None else legacy(pieces, self.tokenizer)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def echo(self, index: int) -> str:
        return self.tokenizer.decode(self.generation.choices[index].prompt) if self.body.echo else ""

    def whole(self) -> dict:
        choices = [
            self.choice(index, self.echo(index) + choice.text, choice.pieces, choice.finish)
            for index, choice in enumerate(self.generation.choices)
        ]
        return self.head | {"choices": choices, "usage": self.generation.usage()}

    async def chunks(self) -> AsyncIterator[dict]:
        if self.body.echo:
            for index in range(len(self.generation.choices)):
                yield self.head | {"choices": [self.choice(index, self.echo(index), [])]}
        async for piece in self.generation:
            yield self.head | {"choices": [self.choice(piece.index, piece.text, [piece], piece.finish)]}
        if self.body.include_usage:
            yield self.head | {"choices": [], "usage": self.generation.usage()}
