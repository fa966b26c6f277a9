"""POST /v1/chat/completions: the messages written out by the model's own template, then continued."""

import secrets
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from regard.server.generation import GenerationTask, TextDelta
from regard.server.logprobs import per_token
from regard.server.schema import ChatBody
from regard.server.service import Service
from regard.server.stream import respond


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        service.check_model(body.model)
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        ids = await service.encode_chat(body.messages, reply=True)
        generation = await service.generate(body, [ids], body.top_logprobs or 0)
        return await respond(request, body.stream, ChatResponse(body, generation, service))

    return routes


class ChatResponse:
    def __init__(self, body: ChatBody, generation: GenerationTask, service: Service):
        self.body, self.generation, self.tokenizer = body, generation, service.tokenizer
        self.head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.name,
        }

    def logprobs(self, pieces: list[TextDelta]) -> dict | None:
        return per_token(pieces, self.tokenizer) if self.body.logprobs else None

    def whole(self) -> dict:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self.logprobs(choice.pieces),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self.generation.choices)
        ]
        return self.head | {"choices": choices, "usage": self.generation.usage()}

    async def chunks(self) -> AsyncIterator[dict]:
        for index in range(len(self.generation.choices)):
            yield self.chunk(index, {"role": "assistant", "content": ""})
        async for piece in self.generation:
            if piece.tokens:
                yield self.chunk(piece.index, {"content": piece.text}, self.logprobs([piece]))
            if piece.finish:
                yield self.chunk(piece.index, {}, finish=piece.finish)
        if self.body.include_usage:
            yield self.head | {"choices": [], "usage": self.generation.usage()}

    def chunk(self, index: int, delta: dict, logprobs: dict | None = None, finish: str | None = None) -> dict:
        return self.head | {
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        }
