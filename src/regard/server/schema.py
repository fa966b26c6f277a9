"""The JSON bodies of requests, with all their limits.

Validation is strict: a string is not converted to a number, NaN and infinity are refused, and an unknown field is an
error. Names and defaults are OpenAI's; `top_k`, `min_p`, `typical_p`, `repetition_penalty`, `min_tokens`,
`ignore_eos`, `stop_token_ids`, `return_token_ids` and `chat_template_kwargs` are common additions. A field of OpenAI's
API that is not supported accepts the values that ask for nothing, which clients send as defaults.

A body may have a million items, and pydantic reports every violation, so validation of it could take seconds in the
event loop. Therefore lists end at their first violation (`fail_fast`), and dictionaries are counted first (`at_most`).
"""

import difflib
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

MAX_TOKENS = 1 << 20
MAX_SAMPLES = 16  # of one prompt
MAX_CHOICES = 128  # samples times the number of prompts
MAX_STOPS = 16
MAX_STOP_IDS = 128
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_PROMPT = 1 << 20  # ids or characters


def at_most(count: int) -> BeforeValidator:
    """Refuses a longer list or dictionary before its items are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            rule = {"items": len(value), "limit": count}
            raise PydanticCustomError("too_long", "it has {items} items; send at most {limit}", rule)
        return value

    return BeforeValidator(check)


def refuse_unknown_fields(body: type[BaseModel], data: Any) -> Any:
    """Refuse the first unknown field with the nearest name. A body may have a million of them."""
    known = {field.alias or name for name, field in body.model_fields.items()}
    for field in data if isinstance(data, dict) else ():
        if field not in known:
            name = field[:100].encode("utf-8", "replace").decode()  # JSON may have lone surrogates
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it"
            raise PydanticCustomError("unknown_field", "unknown field", {"field": name, "remedy": remedy})
    return data


Name = Annotated[str, StringConstraints(max_length=256)]
Text = Annotated[str, StringConstraints(max_length=MAX_PROMPT)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPT)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
IdString = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # keys of JSON objects are strings
LogitBias = Annotated[
    dict[IdString, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), at_most(MAX_BIASES)
]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, data: Any) -> Any:
        return refuse_unknown_fields(cls, data)


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(RequestBody):
    """Exactly one of them, which the whole output matches."""

    json_schema: dict[str, Any] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def check_exactly_one(self) -> "StructuredOutputs":
        if sum(value is not None for value in (self.json_schema, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("structured_outputs needs exactly one of json, regex, choice and grammar")
        return self


class SchedulingBody(RequestBody):
    """When and beside which other requests a request runs. None of it changes the tokens."""

    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None  # lower values first
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None  # seconds


class SamplingBody(SchedulingBody):
    """The fields that /v1/completions and /v1/chat/completions share."""

    model: Name | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None  # -1: a random one, as in vLLM
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    logit_bias: LogitBias | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Field(fail_fast=True, max_length=MAX_STOP_IDS)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None  # vLLM's

    @model_validator(mode="after")
    def check_stream_options(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true; set it, or omit stream_options")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def samples(self) -> int:
        """The number of choices that are generated for each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(SamplingBody):
    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None  # 0: only the prompt, with echo
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    suffix: Text | None = None

    @model_validator(mode="after")
    def check_combinations(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 returns only the prompt, which needs echo; set echo, or raise max_tokens")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of={self.best_of} is smaller than n={self.n or 1}; raise it or omit it")
        if self.stream and self.samples != (self.n or 1):
            raise ValueError("the best samples are known only at the end, so best_of has no stream; omit one of them")
        if self.suffix is not None and (self.echo or not all(isinstance(prompt, str) for prompt in self.prompts)):
            raise ValueError("suffix needs prompts that are strings, and no echo; send strings, and omit echo")
        if self.samples * len(self.prompts) > MAX_CHOICES:
            rule = f"n, or best_of, times the number of prompts may be at most {MAX_CHOICES}"
            raise ValueError(f"{rule}; send fewer at once")
        return self

    @property
    def samples(self) -> int:
        return self.best_of or self.n or 1

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, even if there is only one."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if single else self.prompt)
