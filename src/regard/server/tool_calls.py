"""Tools that a request offers: their grammar, and the calls in the generated text.

    tools, tool_choice ─ offered_tools ─▶ OfferedTools ─ grammar ─▶ the engine's request (required, named, strict)
                                                       ─ stream ─▶ text and calls, while they are generated

By `tool_choice`: `none` offers nothing; `auto` lets the model decide; `required` and a named function constrain the
output to calls whose arguments are valid for their schemas.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from regard.agents.call_grammar import compile_calls
from regard.engine.grammar import Grammar, GrammarCompiler
from regard.server.errors import ApiError
from regard.server.tool_schema import FlatToolChoice, FunctionTool, NamedToolChoice
from regard.text.tool_stream import CallPiece, ToolStream
from regard.text.tool_styles import STYLES, tool_style
from regard.text.tools import call_id


@dataclass
class IdentifiedCall:
    id: str
    name: str
    arguments: str = ""  # so far

    def chat(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallUpdate(NamedTuple):
    """The beginning of a call, or a continuation of its arguments."""

    index: int
    begins: bool
    arguments: str


class CallDelta(NamedTuple):
    text: str
    updates: list[CallUpdate]


class OfferedTools(NamedTuple):
    tools: list[FunctionTool]
    callable: list[FunctionTool]  # all of them, or the named one
    style: str
    constrained: bool  # the output is calls only
    single: bool  # at most one call

    @property
    def strict(self) -> bool:
        return any(tool.strict for tool in self.callable)

    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools]

    @property
    def needs_grammar(self) -> bool:
        return self.constrained or self.strict

    def schema(self, tool: FunctionTool) -> dict[str, Any]:
        """The schema that is enforced. It allows any arguments if neither `tool_choice` nor `strict` asks for more."""
        return tool.schema_of_arguments if self.constrained or tool.strict else {"type": "object"}

    def compile(self, compiler: GrammarCompiler) -> Grammar:
        schemas = {tool.name: self.schema(tool) for tool in self.callable}
        return compile_calls(compiler, self.style, schemas, self.constrained, self.single)


class CallStream:
    """The text and the calls of one choice. Calls get their ids here."""

    def __init__(self, offered: OfferedTools):
        self.offered = offered
        self.parser = ToolStream(offered.style, {tool.name for tool in offered.callable}, offered.single)
        self.text = ""
        self.calls: list[IdentifiedCall] = []

    def push(self, text: str, last: bool) -> CallDelta:
        """`last`: the text ends with it."""
        deltas = [self.parser.push(text), *([self.parser.finish()] if last else [])]
        new = "".join(delta.text for delta in deltas)
        self.text += new
        return CallDelta(new, [self.update(piece) for delta in deltas for piece in delta.pieces])

    def update(self, piece: CallPiece) -> CallUpdate:
        if piece.name is not None:
            id = call_id() if self.offered.style == "mistral" else f"call_{secrets.token_hex(12)}"
            self.calls.append(IdentifiedCall(id, piece.name))
        self.calls[-1].arguments += piece.arguments
        return CallUpdate(len(self.calls) - 1, piece.name is not None, piece.arguments)

    @property
    def text_position(self) -> int:
        """The number of calls that begin before the text."""
        return self.parser.calls_before_text or 0

    def finish_reason(self, finish: str | None) -> str | None:
        return "tool_calls" if finish == "stop" and self.calls else finish


def offered_tools(
    tools: Sequence[FunctionTool],
    choice: str | NamedToolChoice | FlatToolChoice | None,
    parallel: bool | None,
    template: str | None,
) -> OfferedTools | None:
    """None if the model is not to call any. template: the model's chat template."""
    names = [tool.name for tool in tools]
    if duplicate := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise invalid(f"tools has two functions of the name {duplicate!r}; rename one", "tools")
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice asks for a call, but there are no tools; send tools", "tool_choice")
    if not tools or choice == "none":
        return None
    style = tool_style(template)
    if style is None:
        message = "the chat template of this model has no tools; use another model, or omit tools"
        raise ApiError(400, message, code="tools_not_supported", param="tools")
    named = choice.name if isinstance(choice, NamedToolChoice | FlatToolChoice) else None
    callable = [tool for tool in tools if named in (None, tool.name)]
    if not callable:
        raise invalid(f"tool_choice names {named!r}; choose one of {', '.join(names)}", "tool_choice")
    constrained = named is not None or choice == "required"
    result = OfferedTools(list(tools), callable, style, constrained, single=named is not None or parallel is False)
    if result.strict and not constrained and STYLES[style].special:
        reason = f"calls in the {style} style begin with a special token, which no grammar generates"
        message = f"{reason}; strict functions need tool_choice=required: set it, or omit strict"
        raise ApiError(400, message, code="unsupported_value", param="tools")
    for tool in callable if result.needs_grammar else ():
        if result.schema(tool).get("type") != "object":
            raise invalid(f"the parameters of {tool.name} must be a schema of type object", "tools")
    return result


def invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
