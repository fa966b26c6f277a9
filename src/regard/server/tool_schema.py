"""The tools of a request in JSON: functions that the model may call, and calls of earlier messages."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from regard.server.schema import Name, RequestBody, Text

MAX_TOOLS = 128  # OpenAI's
MAX_CALLS = 128  # of one message
MAX_DEPTH = 32  # of the JSON of parameters and arguments

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def limit_depth(value: Any) -> Any:
    """Refuse deeply nested JSON, which recursive functions could not read. Counts level by level, not recursively."""
    level, depth = [value], 0
    while level := [item for part in level if isinstance(part, list | dict) for item in items_of(part)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels; simplify it")
    return value


def items_of(part: list | dict) -> list:
    return list(part.values()) if isinstance(part, dict) else part


ParameterSchema = Annotated[dict[str, Any], AfterValidator(limit_depth)]


class Function(RequestBody):
    name: FunctionName
    description: Text | None = None
    parameters: ParameterSchema | None = None
    strict: bool | None = None


class Tool(RequestBody):
    """As in chat."""

    type: Literal["function"]
    function: Function

    def flat(self) -> "FunctionTool":
        return FunctionTool(type="function", **self.function.model_dump())


class FunctionTool(Function):
    """As in responses."""

    type: Literal["function"]

    def for_template(self) -> dict[str, Any]:
        """In the format that chat templates expect, which is that of chat."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.schema_of_arguments}
        return {"type": "function", "function": function}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}}


class FunctionReference(RequestBody):
    name: FunctionName


class NamedToolChoice(RequestBody):
    """As in chat."""

    type: Literal["function"]
    function: FunctionReference

    @property
    def name(self) -> str:
        return self.function.name


class FlatToolChoice(FunctionReference):
    """As in responses."""

    type: Literal["function"]


Mode = Literal["none", "auto", "required"]


def parsed_arguments(arguments: str) -> str:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("the arguments of a tool call must be a JSON object in a string")
    limit_depth(value)
    return arguments


Arguments = Annotated[Text, AfterValidator(parsed_arguments)]


class CalledFunction(RequestBody):
    name: FunctionName
    arguments: Arguments


class ToolCallItem(RequestBody):
    """A call in an assistant message."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients that join the deltas of a stream keep it

    def for_template(self) -> dict[str, Any]:
        """Templates write the arguments as JSON themselves."""
        arguments = json.loads(self.function.arguments or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
FunctionTools = Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolCalls = Annotated[list[ToolCallItem], Field(fail_fast=True, max_length=MAX_CALLS)]
