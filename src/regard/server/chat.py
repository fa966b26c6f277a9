"""POST /v1/chat/completions: the model's reply to a conversation, which its chat template formats as a prompt."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from regard.server.chat_schema import ChatBody
from regard.server.errors import ApiError
from regard.server.generation import GenerationTask, RouteOptions, TextDelta
from regard.server.grounding import Grounding, citations, grounded
from regard.server.logprobs import chat_logprobs
from regard.server.middleware import tenant_of
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import ChatCompletion, or_stream
from regard.server.responses import data_events, event, respond
from regard.server.served_model import ServedModel
from regard.server.structured_output import outputs_of
from regard.server.tool_calls import CallStream, CallUpdate, OfferedTools
from regard.text.source_prompt import PromptSource


def router(models: ModelRegistry, grounding: Grounding | None = None) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=or_stream(ChatCompletion))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        served = models.find_for(body)
        served.check_queue()
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        if body.search and grounding is None:
            message = "this server has no documents to search; omit search, or serve with --index"
            raise ApiError(400, message, code="no_index", param="search")
        tools = served.offered_tools(body)
        sources = None if grounding is None else await grounding.sources(served, body, tools)
        messages = body.messages if sources is None else grounded(body.messages, sources)
        ids = await served.encode_chat(messages, True, tools, body.chat_template_kwargs)
        images = await served.embed_images(ids, body.messages)
        outputs = tools if tools is not None and tools.needs_grammar else None
        grammar = await served.grammar(outputs or body.structured_outputs or outputs_of(body.response_format))
        options = RouteOptions(body.top_logprobs or 0, grammar=grammar, tenant=tenant_of(request), embeddings=images)
        generation = await served.generate(body, [ids], options)
        return await respond(request, body.stream, ChatResponse(body, generation, served, tools, sources))

    return routes


class ChatResponse:
    """tools: those that the model may call; None: its output is all text. sources: None: the chat is not grounded."""

    def __init__(
        self,
        body: ChatBody,
        generation: GenerationTask,
        served: ServedModel,
        tools: OfferedTools | None = None,
        sources: list[PromptSource] | None = None,
    ):
        self.request, self.generation, self.tokenizer = body, generation, served.tokenizer
        self.sources, self.texts = sources, [""] * len(generation.choices)  # the answers, as far as they are sent
        self.calls = None if tools is None else [CallStream(tools) for _ in generation.choices]
        self.header = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def logprobs(self, deltas: list[TextDelta]) -> dict | None:
        with_ids = bool(self.request.return_token_ids)
        return chat_logprobs(deltas, self.tokenizer, with_ids) if self.request.logprobs else None

    def ids(self, deltas: list[TextDelta]) -> dict:
        return {"token_ids": [id for delta in deltas for id in delta.ids]} if self.request.return_token_ids else {}

    def prompt_ids(self) -> dict:
        return {"prompt_token_ids": self.generation.choices[0].prompt} if self.request.return_token_ids else {}

    def listed_sources(self) -> dict:
        return {} if self.sources is None else {"sources": [source.data for source in self.sources]}

    def cited(self, index: int) -> dict:
        return {} if self.sources is None else {"citations": citations(self.texts[index], self.sources)}

    def body(self) -> dict:
        choices = []
        for choice in self.generation.choices:
            message: dict = {"role": "assistant", "content": choice.text, "refusal": None}
            finish = choice.finish
            if self.calls is not None:
                calls = self.calls[choice.index]
                calls.push(choice.text, last=True)
                finish = calls.finish_reason(finish)
                message["content"] = calls.text or (None if calls.calls else "")
                if calls.calls:
                    message["tool_calls"] = [call.chat() for call in calls.calls]
            logprobs = self.logprobs(choice.deltas)
            answer = {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": finish}
            self.texts[choice.index] = choice.text
            choices.append(answer | self.ids(choice.deltas) | self.cited(choice.index))
        facts = self.prompt_ids() | self.listed_sources()
        return self.header | {"choices": choices, "usage": self.generation.usage()} | facts

    def events(self) -> AsyncIterator[str]:
        return data_events(self.chunks())

    async def chunks(self) -> AsyncIterator[str]:
        for choice in self.generation.choices:
            first = self.prompt_ids() | self.listed_sources() if choice.index == 0 else {}
            yield event(self.chunk(choice.index, {"role": "assistant", "content": ""}) | first)
        async for delta in self.generation:
            for chunk in self.delta_chunks(delta):
                yield event(chunk)
        if self.request.include_usage:
            yield event(self.header | {"choices": [], "usage": self.generation.usage()})

    def delta_chunks(self, delta: TextDelta) -> Iterator[dict]:
        text, finish, calls = delta.text, delta.finish, []
        self.texts[delta.index] += text
        if self.calls is not None:
            stream = self.calls[delta.index]
            text, updates = stream.push(delta.text, last=delta.finish is not None)
            finish = stream.finish_reason(finish)
            calls = [call for update in updates for call in call_deltas(stream, update)]
        logprobs, ids = self.logprobs([delta]), self.ids([delta])
        if text or ids.get("token_ids") or (delta.tokens and (self.calls is None or logprobs)):
            yield self.chunk(delta.index, {"content": text}, logprobs, ids=ids)
        for call in calls:
            yield self.chunk(delta.index, {"tool_calls": [call]})
        if finish:
            yield self.chunk(delta.index, {}, finish=finish, ids=self.cited(delta.index))

    def chunk(
        self, index: int, delta: dict, logprobs: dict | None = None, finish: str | None = None, ids: dict | None = None
    ) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self.header | {"choices": [choice | (ids or {})]}


def call_deltas(stream: CallStream, update: CallUpdate) -> Iterator[dict]:
    """A call begins with its id and name; its arguments follow in pieces."""
    if update.begins:
        call = stream.calls[update.index]
        function = {"name": call.name, "arguments": ""}
        yield {"index": update.index, "id": call.id, "type": "function", "function": function}
    if update.arguments:
        yield {"index": update.index, "function": {"arguments": update.arguments}}
