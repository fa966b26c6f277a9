"""The JSON bodies of requests, with all their limits.

Validation is strict: a string is not converted to a number, NaN and infinity are refused, and an unknown field is an
error. Names and defaults are OpenAI's; `top_k`, `min_p` and `repetition_penalty` are common additions.
"""

from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MAX_TOKENS = 1 << 20
MAX_CHOICES = 16  # n times the number of prompts
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_MESSAGES = 1024
MAX_PROMPT = 1 << 20  # ids or characters

Text = Annotated[str, StringConstraints(max_length=MAX_PROMPT)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=MAX_PROMPT)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(RequestBody):
    include_usage: bool = False


class SamplingBody(RequestBody):
    """The fields that /v1/completions and /v1/chat/completions share."""

    model: Annotated[str, StringConstraints(max_length=256)]
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=256)] | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true; set it, or omit stream_options")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(SamplingBody):
    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def check_combinations(self) -> "CompletionBody":
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not supported; omit one of them")
        if (self.n or 1) * len(self.prompts) > MAX_CHOICES:
            raise ValueError(f"n times the number of prompts may be at most {MAX_CHOICES}; send fewer at once")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, even if there is only one."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if single else self.prompt)


class TextPart(RequestBody):
    type: Literal["text"]
    text: Text


class Message(RequestBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]

    def for_template(self) -> dict[str, str]:
        """The message for a chat template: text parts are joined, and `developer`, OpenAI's new role, is `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(SamplingBody):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def check_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true; set it, or omit top_logprobs")
        return self


class PassageBody(RequestBody):
    """A text to inspect: a string, or the messages of a chat, which the model's chat template formats."""

    text: Text | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def check_exactly_one(self) -> "PassageBody":
        if (self.text is None) == (self.messages is None):
            raise ValueError("text and messages are both set or both missing; send exactly one of them")
        return self


class AttentionBody(PassageBody):
    """With `layer` and `head` the full map of one head; without them an overview of all heads."""

    layer: Annotated[int, Field(ge=0, lt=1 << 16)] | None = None
    head: Annotated[int, Field(ge=0, lt=1 << 16)] | None = None

    @model_validator(mode="after")
    def check_head(self) -> "AttentionBody":
        if (self.layer is None) != (self.head is None):
            raise ValueError("layer and head go together; send both for one map, or neither for the overview")
        return self
