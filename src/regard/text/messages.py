"""Messages of examples, and the tools that they call, in OpenAI's format, checked and as chat templates read them."""

import json
from collections.abc import Mapping
from typing import Any

ToolList = list[dict[str, Any]]


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"`messages` must be a list with at least one message, found {messages!r:.60}")
    return [checked_message(message) for message in messages]


def checked_message(message: Any) -> dict[str, Any]:
    """The message with calls as templates read them: their arguments are an object, and a missing content is empty."""
    if isinstance(message, dict) and message.get("tool_calls"):
        calls = message["tool_calls"]
        calls = [checked_call(call) for call in (calls if isinstance(calls, list | tuple) else [calls])]
        message = message | {"content": message.get("content") or "", "tool_calls": calls}
    valid = isinstance(message, dict) and isinstance(message.get("role"), str)
    if not valid or not isinstance(message.get("content"), str):
        raise ValueError(
            f"a message needs `role` (user, assistant, system …) and `content` (a string); found {message!r:.80}"
        )
    return message


def checked_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        arguments = parsed(function.get("arguments") or {})
        if isinstance(arguments, dict):
            return call | {"type": "function", "function": function | {"arguments": arguments}}
    raise ValueError(
        "a call in `tool_calls` needs a `function` with `name` and `arguments`, an object or its JSON; found "
        f"{call!r:.80}"
    )


def tools_of(example: Mapping[str, Any]) -> ToolList | None:
    """The column `tools`: a list of the functions that may be called, or its JSON."""
    tools = parsed(example.get("tools") or None)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"`tools` must be a list of functions in OpenAI's format, or its JSON; found {tools!r:.60}")
    return tools


def parsed(value: Any) -> Any:
    """The value of a string of JSON; other values, and strings that are none, are returned as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
