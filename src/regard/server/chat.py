"""POST /v1/chat/completions: the model's reply to a conversation, which its chat template formats as a prompt."""

import secrets
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from regard.server.chat_schema import ChatBody
from regard.server.generation import GenerationTask, RouteOptions, TextDelta
from regard.server.logprobs import chat_logprobs
from regard.server.model_registry import ModelRegistry
from regard.server.response_schema import ChatCompletion, or_stream
from regard.server.responses import data_events, respond
from regard.server.served_model import ServedModel
from regard.server.structured_output import outputs_of


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=or_stream(ChatCompletion))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        served = models.find(body.model)
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        ids = await served.encode_chat(body.messages, add_generation_prompt=True)
        grammar = await served.grammar(body.structured_outputs or outputs_of(body.response_format))
        generation = await served.generate(body, [ids], RouteOptions(body.top_logprobs or 0, grammar=grammar))
        return await respond(request, body.stream, ChatResponse(body, generation, served))

    return routes


class ChatResponse:
    def __init__(self, body: ChatBody, generation: GenerationTask, served: ServedModel):
        self.request, self.generation, self.tokenizer = body, generation, served.tokenizer
        self.header = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def logprobs(self, deltas: list[TextDelta]) -> dict | None:
        return chat_logprobs(deltas, self.tokenizer) if self.request.logprobs else None

    def body(self) -> dict:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self.logprobs(choice.deltas),
                "finish_reason": choice.finish,
            }
            for choice in self.generation.choices
        ]
        return self.header | {"choices": choices, "usage": self.generation.usage()}

    def events(self) -> AsyncIterator[str]:
        return data_events(self.chunks())

    async def chunks(self) -> AsyncIterator[dict]:
        for choice in self.generation.choices:
            yield self.chunk(choice.index, {"role": "assistant", "content": ""})
        async for delta in self.generation:
            if delta.tokens:
                yield self.chunk(delta.index, {"content": delta.text}, self.logprobs([delta]))
            if delta.finish:
                yield self.chunk(delta.index, {}, finish=delta.finish)
        if self.request.include_usage:
            yield self.header | {"choices": [], "usage": self.generation.usage()}

    def chunk(self, index: int, delta: dict, logprobs: dict | None = None, finish: str | None = None) -> dict:
        return self.header | {
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        }
