"""The JSON bodies that contain the messages of a chat."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from regard.server.image_input import ImagePart
from regard.server.schema import MAX_LOGPROBS, Count, Name, RequestBody, SamplingBody, Text, at_most
from regard.server.structured_output import JsonObjectFormat, JsonSchemaFormat, TextFormat, outputs_of
from regard.server.tool_schema import FunctionTool, Mode, NamedToolChoice, ToolCalls, Tools, limit_depth

MAX_MESSAGES = 1024
MAX_PARTS = 4096  # of all messages together

Empty = Annotated[list, at_most(0), Field(max_length=0)]
# OpenAI's limits
Label = Annotated[str, StringConstraints(max_length=64)]
Metadata = Annotated[dict[Label, Annotated[str, StringConstraints(max_length=512)]], at_most(16), Field(max_length=16)]


class TextPart(RequestBody):
    type: Literal["text"]
    text: Text


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(RequestBody):
    """A message of a request, or the message of an earlier response, which has more fields, most without a value."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: Label | None = None
    refusal: None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Name | None = None
    function_call: None = None
    audio: None = None
    annotations: Empty | None = None

    @model_validator(mode="after")
    def check_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"the content of a message of role {self.role} is null; send a string, which may be empty")
        if self.images and self.role != "user":
            raise ValueError(f"a message of role {self.role} has images; only a user sends them")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has tool_calls; only the assistant calls tools")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id goes with role tool, and names the call that the message is the result of")
        return self

    @property
    def images(self) -> list[str]:
        """The data URLs of its images."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """The message for a chat template: text parts are joined unless there are images between them, and
        `developer`, OpenAI's new role, is `system`."""
        content: Any = self.content or ""
        if self.images:
            content = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in content
            ]
        elif not isinstance(content, str):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        others = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in others.items() if value is not None}


def limit_parts(messages: Any) -> Any:
    """Count the parts and tool calls of all messages, before they are validated."""
    if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
        found = [message for message in messages if isinstance(message, dict)]
        contents = [message.get(key) for message in found for key in ("content", "tool_calls")]
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if parts > MAX_PARTS:
            rule = {"parts": parts, "limit": MAX_PARTS}
            raise PydanticCustomError("too_long", "they have {parts} parts; send at most {limit}", rule)
    return messages


Messages = Annotated[
    list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), BeforeValidator(limit_parts)
]


MAX_VARIABLES = 64
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TemplateVariables = Annotated[
    dict[VariableName, Any], at_most(MAX_VARIABLES), Field(max_length=MAX_VARIABLES), AfterValidator(limit_depth)
]
ChatFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatBody(SamplingBody):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    response_format: ChatFormat | None = None
    tools: Tools | None = None
    tool_choice: Mode | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    search: bool | None = None  # in the server's documents; by default whenever it has some and there is a question

    # Accepted only with a value that asks for nothing
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, min_length=1, max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    function_call: Literal["none", "auto"] | None = None
    functions: None = None
    audio: None = None
    prediction: None = None
    moderation: None = None
    web_search_options: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: Literal["in_memory"] | None = None

    # Labels and hints, which never change a response
    metadata: Metadata | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None

    @property
    def functions_offered(self) -> list[FunctionTool]:
        return [tool.flat() for tool in self.tools or []]

    @model_validator(mode="after")
    def check_combinations(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true; set it, or omit top_logprobs")
        if self.structured_outputs is not None and outputs_of(self.response_format) is not None:
            raise ValueError("response_format and structured_outputs both constrain the output; omit one of them")
        if self.tools and self.tool_choice != "none" and (self.structured_outputs or outputs_of(self.response_format)):
            raise ValueError(
                "an output of this format cannot be a tool call; omit tools, or set tool_choice to none, or omit "
                "response_format and structured_outputs"
            )
        return self


class PassageBody(RequestBody):
    """A text to inspect: a string, or the messages of a chat, which the model's chat template formats."""

    model: Name | None = None
    text: Text | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def check_exactly_one(self) -> "PassageBody":
        if (self.text is None) == (self.messages is None):
            raise ValueError("text and messages are both set or both missing; send exactly one of them")
        return self
