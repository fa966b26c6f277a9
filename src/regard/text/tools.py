"""Tool calls in a whole output of a model, in the style of its family (`regard.text.tool_styles`).

The text of a model is not trusted: what does not parse as a call of an offered tool stays text.
"""

import json
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from regard.text.tool_stream import ToolStream
from regard.text.tool_styles import ToolCall, tool_style


class ParsedOutput(NamedTuple):
    text: str
    calls: tuple[ToolCall, ...]


def parse_tool_calls(text: str, style: str, tools: Collection[str]) -> ParsedOutput:
    """The text without its calls, and the calls. tools: names of the offered tools; other calls stay text.

    If the arguments of a call are no JSON object, because the output was cut, the whole output stays text.
    """
    stream = ToolStream(style, tools)
    deltas = [stream.push(text), stream.finish()]
    calls: list[ToolCall] = []
    for piece in (piece for delta in deltas for piece in delta.pieces):
        name, arguments = (piece.name, "") if piece.name is not None else calls.pop()
        calls.append(ToolCall(name, arguments + piece.arguments))
    if not all(is_object(call.arguments) for call in calls):
        return ParsedOutput(text, ())
    return ParsedOutput("".join(delta.text for delta in deltas), tuple(calls))


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def require_tool_style(chat_template: str | None) -> str:
    """`tool_style`, or ValueError if the template knows none of them."""
    style = tool_style(chat_template)
    if style is None:
        raise ValueError("the chat template of this model has no tools; use another model, or leave tools out")
    return style


def assistant_message(text: str, chat_template: str | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of an output, which may call the tools. Arguments are objects, as chat templates expect them.

    tools: in OpenAI's format, {"type": "function", "function": {"name", …}}. ValueError if the template has no tools.
    """
    style = require_tool_style(chat_template)
    found = parse_tool_calls(text, style, {tool["function"]["name"] for tool in tools})
    message: dict[str, Any] = {"role": "assistant", "content": found.text}
    if found.calls:
        functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in found.calls]
        message["tool_calls"] = [{"id": call_id(), "type": "function", "function": each} for each in functions]
    return message


def call_id() -> str:
    """Nine letters and digits: templates of Mistral refuse other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
