"""POST /v1/responses: OpenAI's Responses API, without storage: each request brings the whole conversation.

The events of a stream, each with its `sequence_number`:

    response.created, response.in_progress, response.output_item.added, response.content_part.added,
    response.output_text.delta …,
    response.output_text.done, response.content_part.done, response.output_item.done, response.completed

A call of a function is an output item of its own: response.output_item.added, response.function_call_arguments.delta …,
and at the end of the output response.function_call_arguments.done, response.output_item.done.

The last one is `response.incomplete` if the limit of tokens ended the text, and `error` if the generation failed.
"""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count

from fastapi import APIRouter, Request
from starlette.responses import Response

from regard.server.errors import ApiError
from regard.server.generation import GenerationTask, RouteOptions, TextDelta
from regard.server.logprobs import chat_logprobs
from regard.server.middleware import tenant_of
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import or_stream
from regard.server.responses import error_event, event, format_tokens, respond
from regard.server.responses_api_schema import ResponsesBody, ResponsesResponse
from regard.server.schema import SamplingBody
from regard.server.served_model import ServedModel
from regard.server.structured_output import outputs_of
from regard.server.tool_calls import CallStream, CallUpdate, IdentifiedCall, OfferedTools
from regard.server.tool_schema import FlatToolChoice
from regard.text.tools import is_object


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", responses=or_stream(ResponsesResponse))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        served = models.find_for(body)
        served.check_queue()
        tools = served.offered_tools(body)
        ids = await served.encode_chat(body.messages, True, tools, body.chat_template_kwargs)
        images = await served.embed_images(ids, body.messages)
        sampling = SamplingBody(
            model=body.model, max_tokens=body.max_output_tokens, temperature=body.temperature, top_p=body.top_p,
            cache_salt=body.cache_salt, priority=body.priority, timeout=body.timeout,
        )  # fmt: skip
        outputs = None if body.text is None else outputs_of(body.text.format)
        grammar = await served.grammar(tools if tools is not None and tools.needs_grammar else outputs)
        options = RouteOptions(body.top_logprobs or 0, grammar=grammar, tenant=tenant_of(request), embeddings=images)
        generation = await served.generate(sampling, [ids], options)
        return await respond(request, body.stream, ResponsesFormat(body, generation, served, tools))

    return routes


class ResponsesFormat:
    """tools: those that the model may call; None: its output is all text."""

    def __init__(
        self, body: ResponsesBody, generation: GenerationTask, served: ServedModel, tools: OfferedTools | None = None
    ):
        self.request, self.generation, self.served = body, generation, served
        self.id, self.message_id = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        self.created = int(time.time())
        self.sequence = count()
        self.calls = None if tools is None else CallStream(tools)
        self.place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        self.opened = False  # the message has begun, in a stream

    def body(self) -> dict:
        if self.calls is not None:
            self.calls.push(self.generation.choices[0].text, last=True)
        return self.response(self.status, self.output())

    def output(self) -> list[dict]:
        """The items of a finished generation: the text, unless there are only calls, and the calls, as they began."""
        choice = self.generation.choices[0]
        if self.calls is None:
            return [self.message(self.status, [self.part(choice.text, choice.deltas)])]
        items = [call_item(call, call_status(call)) for call in self.calls.calls]
        if self.calls.text or not items:
            part = self.part(self.calls.text, choice.deltas)
            items.insert(self.calls.text_position, self.message(self.status, [part]))
        return items

    @property
    def status(self) -> str:
        return "completed" if self.generation.choices[0].finish == "stop" else "incomplete"

    async def events(self) -> AsyncIterator[str]:
        try:
            async for data in self.stream():
                yield self.event(data)
            tokens = self.generation.choices[0].token_count
            for encoded in await format_tokens(tokens, lambda: [self.event(data) for data in self.last_events()]):
                yield encoded
        except ApiError as error:
            yield self.event(error_event(error))

    def event(self, data: dict) -> str:
        return f"event: {data['type']}\n" + event(data | {"sequence_number": next(self.sequence)})

    async def stream(self) -> AsyncIterator[dict]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self.response("in_progress", [])}
        for data in self.message_begin() if self.calls is None else ():  # an output of only calls has no message
            yield data
        async for delta in self.generation:
            for data in self.delta_events(delta):
                yield data

    def last_events(self) -> Iterator[dict]:
        """They repeat the whole output several times."""
        response = self.response(self.status, self.output())
        if not self.opened and response["output"][0]["type"] == "message":  # neither text nor calls
            yield from self.message_begin()
        for index, item in enumerate(response["output"]):
            yield from self.message_end(item) if item["type"] == "message" else call_end(item, index)
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{response['status']}", "response": response}

    def delta_events(self, delta: TextDelta) -> Iterator[dict]:
        """Of the text and of the pieces of calls. Items end with the output, because text may follow a call."""
        text, updates, calls_before = delta.text, [], 0
        if self.calls is not None:
            calls_before = len(self.calls.calls)
            text, updates = self.calls.push(delta.text, bool(delta.finish))
        events = [event for update in updates for event in self.call_events(update)]
        late = self.calls is not None and not self.opened and self.calls.text_position > calls_before
        yield from events if late else ()  # the text begins after calls of the same delta
        if text and not self.opened:
            yield from self.message_begin()
        if text or (delta.tokens and self.calls is None):
            changed = {"delta": text, "logprobs": self.logprobs([delta])}
            yield {"type": "response.output_text.delta", **self.place, **changed}
        yield from () if late else events

    def call_events(self, update: CallUpdate) -> Iterator[dict]:
        assert self.calls is not None, "only an output with tools has calls"
        item = call_item(self.calls.calls[update.index], "in_progress")
        with_text = self.calls.text and self.calls.text_position <= update.index
        index = update.index + bool(with_text)
        if update.begins:
            yield {"type": "response.output_item.added", "output_index": index, "item": item | {"arguments": ""}}
        if update.arguments:
            place = {"item_id": item["id"], "output_index": index}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": update.arguments}

    def message_begin(self) -> Iterator[dict]:
        self.opened = True
        self.place["output_index"] = 0 if self.calls is None else self.calls.text_position
        empty = self.message("in_progress", [])
        yield {"type": "response.output_item.added", "output_index": self.place["output_index"], "item": empty}
        yield {"type": "response.content_part.added", **self.place, "part": self.part("", [])}

    def message_end(self, item: dict) -> Iterator[dict]:
        part = item["content"][0]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.output_text.done", **self.place, **done}
        yield {"type": "response.content_part.done", **self.place, "part": part}

    def logprobs(self, deltas: list[TextDelta]) -> list[dict]:
        return chat_logprobs(deltas, self.served.tokenizer)["content"] if self.request.include else []

    def part(self, text: str, deltas: list[TextDelta]) -> dict:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(deltas)}

    def message(self, status: str, content: list[dict]) -> dict:
        return {
            "id": self.message_id, "type": "message", "role": "assistant", "status": status, "content": content,
        }  # fmt: skip

    def response(self, status: str, output: list[dict]) -> dict:
        request, choice = self.request, self.request.tool_choice
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
            "tool_choice": choice.model_dump() if isinstance(choice, FlatToolChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or []],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self.usage(),
            "user": request.user,
        }

    def usage(self) -> dict:
        usage = self.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def call_status(call: IdentifiedCall) -> str:
    """The limit of tokens may have cut off the arguments."""
    return "completed" if is_object(call.arguments) else "incomplete"


def call_item(call: IdentifiedCall, status: str) -> dict:
    return {
        "id": f"fc_{call.id.removeprefix('call_')}", "type": "function_call", "call_id": call.id, "name": call.name,
        "arguments": call.arguments, "status": status,
    }  # fmt: skip


def call_end(item: dict, index: int) -> Iterator[dict]:
    place = {"item_id": item["id"], "output_index": index}
    done = {"name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **place, **done}
