"""The JSON bodies of responses, for the API's schema. The routes build them as dictionaries; tests validate those."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Status(ResponseBody):
    status: Literal["ok"]


class ModelCard(ResponseBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = None  # of an adapter: its model
    max_model_len: int | None = None  # tokens of prompt and answer, for an encoder of a text; None: any number


class ModelList(ResponseBody):
    object: Literal["list"]
    data: list[ModelCard]


class PromptTokensDetails(ResponseBody):
    cached_tokens: int  # that were in the prefix cache


class Usage(ResponseBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(ResponseBody):
    id: int | None = None  # with return_token_ids
    token: str
    logprob: float | None  # None for the first token of a prompt
    bytes: list[int] | None


class TokenLogprobs(TokenLogprob):
    rank: int | None = None  # in the vocabulary, 1 for the most likely token; with return_token_ids and alternatives
    entropy: float | None = None  # of the distribution over the vocabulary, in nats; likewise
    top_logprobs: list[TokenLogprob]


class CompletionLogprobs(ResponseBody):
    """Parallel lists over the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    content: list[TokenLogprobs] | None = None  # the same tokens with their ids, with return_token_ids


class CompletionChoice(ResponseBody):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: list[int] | None = None  # with return_token_ids
    token_ids: list[int] | None = None


class Completion(ResponseBody):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatLogprobs(ResponseBody):
    content: list[TokenLogprobs]


class ReturnedFunction(ResponseBody):
    name: str
    arguments: str


class MessageToolCall(ResponseBody):
    id: str
    type: Literal["function"]
    function: ReturnedFunction


class AssistantMessage(ResponseBody):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MessageToolCall] | None = None  # absent if there are none


class ChatSource(ResponseBody):
    number: int
    path: str
    unit: str
    first: int
    last: int
    section: list[str]
    score: float
    text: str


class ChatChoice(ResponseBody):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None  # with return_token_ids
    citations: list[int] | None = None  # of sources, in the answer of a grounded chat


class ChatCompletion(ResponseBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None  # with return_token_ids
    sources: list[ChatSource] | None = None  # of a grounded chat


def or_stream(body: type[ResponseBody]) -> dict[int | str, dict[str, Any]]:
    """For a route that answers with this body, or with a stream of events if the request sets `stream`."""
    text = {"type": "string"}
    fields = {"data": text | {"description": "JSON, or [DONE]"}, "event": text}
    events = {"schema": {"type": "object", "properties": fields, "required": ["data"], "description": "One event"}}
    return {200: {"model": body, "content": {"text/event-stream": events}}}
