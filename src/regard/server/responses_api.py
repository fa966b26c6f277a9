"""POST /v1/responses: OpenAI's Responses API, without storage: each request brings the whole conversation.

The events of a stream, each with its `sequence_number`:

    response.created, response.in_progress, response.output_item.added, response.content_part.added,
    response.output_text.delta …,
    response.output_text.done, response.content_part.done, response.output_item.done, response.completed

The last one is `response.incomplete` if the limit of tokens ended the text, and `error` if the generation failed.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from itertools import count

from fastapi import APIRouter, Request
from starlette.responses import Response

from regard.server.errors import ApiError
from regard.server.generation import GenerationTask, RouteOptions, TextDelta
from regard.server.logprobs import chat_logprobs
from regard.server.model_registry import ModelRegistry
from regard.server.response_schema import or_stream
from regard.server.responses import event, respond
from regard.server.responses_schema import ResponsesBody, ResponsesResponse
from regard.server.schema import SamplingBody
from regard.server.served_model import ServedModel
from regard.server.structured_output import outputs_of


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", responses=or_stream(ResponsesResponse))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        served = models.find(body.model)
        ids = await served.encode_chat(body.messages, add_generation_prompt=True)
        sampling = SamplingBody(
            model=body.model, max_tokens=body.max_output_tokens, temperature=body.temperature, top_p=body.top_p
        )
        grammar = await served.grammar(None if body.text is None else outputs_of(body.text.format))
        generation = await served.generate(sampling, [ids], RouteOptions(body.top_logprobs or 0, grammar=grammar))
        return await respond(request, body.stream, ResponsesFormat(body, generation, served))

    return routes


class ResponsesFormat:
    def __init__(self, body: ResponsesBody, generation: GenerationTask, served: ServedModel):
        self.request, self.generation, self.served = body, generation, served
        self.id, self.message_id = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        self.created = int(time.time())
        self.sequence = count()

    def body(self) -> dict:
        choice = self.generation.choices[0]
        return self.response("completed" if choice.finish == "stop" else "incomplete", [self.message(choice.finish)])

    async def events(self) -> AsyncIterator[str]:
        try:
            async for data in self.stream():
                yield self.event(data)
                await asyncio.sleep(0)  # lets the event loop handle a disconnect while the queue is full
        except ApiError as error:
            detail = error.body()["error"]
            yield self.event({"type": "error", **{key: detail[key] for key in ("code", "message", "param")}})

    def event(self, data: dict) -> str:
        return f"event: {data['type']}\n" + event(data | {"sequence_number": next(self.sequence)})

    async def stream(self) -> AsyncIterator[dict]:
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self.response("in_progress", [])}
        empty = self.message(None) | {"content": []}
        yield {"type": "response.output_item.added", "output_index": 0, "item": empty}
        yield {"type": "response.content_part.added", **place, "part": self.part("", [])}
        async for delta in self.generation:
            if delta.tokens or delta.text:
                changed = {"delta": delta.text, "logprobs": self.logprobs([delta])}
                yield {"type": "response.output_text.delta", **place, **changed}
        choice = self.generation.choices[0]
        part = self.part(choice.text, choice.deltas)
        done = {"text": choice.text, "logprobs": part["logprobs"]}
        yield {"type": "response.output_text.done", **place, **done}
        yield {"type": "response.content_part.done", **place, "part": part}
        response = self.body()
        yield {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]}
        yield {"type": f"response.{response['status']}", "response": response}

    def logprobs(self, deltas: list[TextDelta]) -> list[dict]:
        return chat_logprobs(deltas, self.served.tokenizer)["content"] if self.request.include else []

    def part(self, text: str, deltas: list[TextDelta]) -> dict:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(deltas)}

    def message(self, finish: str | None) -> dict:
        status = "in_progress" if finish is None else "completed" if finish == "stop" else "incomplete"
        choice = self.generation.choices[0]
        content = [self.part(choice.text, choice.deltas)]
        return {
            "id": self.message_id, "type": "message", "role": "assistant", "status": status, "content": content,
        }  # fmt: skip

    def response(self, status: str, output: list[dict]) -> dict:
        request, usage = self.request, self.generation.usage()
        asked = None if request.text is None else request.text.format
        format = {"type": "text"} if asked is None else asked.model_dump(by_alias=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.served.name,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": format},
            "tool_choice": request.tool_choice or "auto",
            "tools": [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None
            if status == "in_progress"
            else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "user": request.user,
        }
