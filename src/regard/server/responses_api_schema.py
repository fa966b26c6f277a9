"""The JSON bodies of OpenAI's Responses API."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from regard.server.chat_schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    Empty,
    Message,
    Metadata,
    TemplateVariables,
    TextPart,
    limit_parts,
)
from regard.server.image_input import DataUrl, ImagePart, ImageUrl
from regard.server.response_bodies import ResponseBody, TokenLogprobs
from regard.server.schema import MAX_LOGPROBS, Count, Name, RequestBody, SchedulingBody, Text, at_most
from regard.server.structured_output import FlatJsonSchemaFormat, JsonObjectFormat, TextFormat, outputs_of
from regard.server.tool_schema import (
    Arguments,
    CalledFunction,
    FlatToolChoice,
    FunctionName,
    FunctionTool,
    FunctionTools,
    Mode,
    ToolCallItem,
)

LOGPROBS = "message.output_text.logprobs"
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputPart(RequestBody):
    """Text of a user, or a part of an earlier response."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Empty | None = None
    logprobs: Annotated[list[Any], at_most(1 << 16)] | None = None


class InputImage(RequestBody):
    type: Literal["input_image"]
    image_url: DataUrl
    detail: Literal["auto"] | None = None
    file_id: None = None


MessagePart = Annotated[InputPart | InputImage, Field(discriminator="type")]


class InputItem(RequestBody):
    """A message, or an item of an earlier response's output."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True)]
    id: Name | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def message(self) -> Message:
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        return Message(role=self.role, content=[part_of_message(part) for part in self.content])


class FunctionCallItem(RequestBody):
    """A call of an earlier response's output."""

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: Arguments
    id: Name | None = None
    status: ItemStatus | None = None
    namespace: None = None
    caller: None = None
    async_: None = None  # as the client dumps it

    def message(self) -> Message:
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return Message(role="assistant", tool_calls=[ToolCallItem(id=self.call_id, function=function)])


class FunctionCallOutput(RequestBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Text | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]
    id: Name | None = None
    status: ItemStatus | None = None

    def message(self) -> Message:
        return Message(role="tool", content=text_of(self.output), tool_call_id=self.call_id)


def part_of_message(part: InputPart | InputImage) -> TextPart | ImagePart:
    if isinstance(part, InputPart):
        return TextPart(type="text", text=part.text)
    return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url))


def text_of(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def item_kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in ("function_call", "function_call_output") else "message"


# The type of a message may be missing.
AnyItem = Annotated[
    Annotated[InputItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(item_kind),
]


class TextConfig(RequestBody):
    format: Annotated[TextFormat | JsonObjectFormat | FlatJsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(RequestBody):
    effort: Literal["none"] | None = None
    summary: None = None


class ResponsesStreamOptions(RequestBody):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SchedulingBody):
    model: Name | None = None
    input: (
        Text
        | Annotated[
            list[AnyItem],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            BeforeValidator(limit_parts),
        ]
    )
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=1, fail_fast=True)] | None = None
    stream: bool | None = None

    text: TextConfig | None = None
    tools: FunctionTools | None = None
    tool_choice: Mode | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    # Accepted only with a value that asks for nothing
    stream_options: ResponsesStreamOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    moderation: None = None
    context_management: None = None
    prompt_cache_options: None = None
    access_programs: None = None
    image: None = None

    # Labels and hints, which never change a response
    metadata: Metadata | None = None
    max_tool_calls: Count | None = None  # of built-in tools
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    user: Name | None = None

    @model_validator(mode="after")
    def check_combinations(self) -> "ResponsesBody":
        if self.top_logprobs and not self.include:
            raise ValueError(f"top_logprobs requires include=[{LOGPROBS!r}]; set it, or omit top_logprobs")
        format = None if self.text is None else self.text.format
        if self.tools and self.tool_choice != "none" and outputs_of(format) is not None:
            raise ValueError(
                "an output of this format cannot be a tool call; omit tools, or set tool_choice to none, or omit "
                "text.format"
            )
        return self

    @property
    def functions_offered(self) -> list[FunctionTool]:
        return self.tools or []

    @property
    def messages(self) -> list[Message]:
        start = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*start, Message(role="user", content=self.input)]
        return [*start, *joined(item.message() for item in self.input)]


def joined(messages: Iterable[Message]) -> list[Message]:
    """The messages with calls in the message of the assistant before them, as in chat."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else None
        if message.tool_calls and last is not None and last.role == "assistant":
            result[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or []), *message.tool_calls]})
        else:
            result.append(message)
    return result


class OutputText(ResponseBody):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[TokenLogprobs]


class OutputMessage(ResponseBody):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(ResponseBody):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class InputTokensDetails(ResponseBody):
    cached_tokens: int


class OutputTokensDetails(ResponseBody):
    reasoning_tokens: int


class ResponsesUsage(ResponseBody):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseBody):
    reason: Literal["max_output_tokens"]


class ResponsesResponse(ResponseBody):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, dict[str, Any]]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage
    user: str | None
