"""The styles in which families of models write tool calls.

hermes    <tool_call>{"name": "f", "arguments": {…}}</tool_call>, between text, several times (Hermes, Qwen)
llama3    {"name": "f", "parameters": {…}}, the whole output, several separated by ; (Llama 3)
mistral   [TOOL_CALLS][{"name": "f", "arguments": {…}}, …] or [TOOL_CALLS]f[ARGS]{…} after text (Mistral)
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

DECODER = json.JSONDecoder()
ARGUMENTS = "[ARGS]"


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object


class ToolStyle(NamedTuple):
    begin: str  # starts calls anywhere in the text
    end: str | None  # ends them; None: they reach to the end of the output
    bare: str | None  # an output that begins with it may be calls as a whole, without the `begin` marker
    head: re.Pattern[str]  # of a call, from the marker to the arguments; groups: name, and object if it is one
    separator: str | None  # after a call that another one follows without a marker
    closing: str | None  # after the last call
    parse: Callable[[str], list[ToolCall]]  # of all calls after a marker; raises ValueError
    syntax: "CallSyntax"
    special: bool = False  # a model begins calls with a special token, which no grammar generates


class CallSyntax(NamedTuple):
    """How calls are written if nothing else is: opening, then the calls between separators, then closing.

    Without the markers that are special tokens, which are not decoded. A call is `before(name)`, arguments, `after`.
    """

    prefix: str  # then the name in quotes
    key: str  # then the arguments
    after: str
    separator: str
    opening: str = ""
    closing: str = ""

    def before(self, name: str) -> str:
        return self.prefix + json.dumps(name) + self.key


def tool_style(chat_template: str | None) -> str | None:
    """The style in which a model with this chat template calls tools; None if it knows none of them."""
    marks = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": '"parameters"'}
    template = chat_template or ""
    if "tools" not in template or "<function=" in template:  # calls as XML, by Qwen3-Coder
        return None
    return next((style for style, mark in marks.items() if mark in template), None)


def parse_hermes(body: str) -> list[ToolCall]:
    return [tool_call(json.loads(body), "arguments")]


def parse_llama3(body: str) -> list[ToolCall]:
    calls, position = [], 0
    while position < len(body):
        value, position = DECODER.raw_decode(body, position)
        calls.append(tool_call(value, "parameters", "arguments"))
        rest = body[position:].lstrip()
        if rest and not rest.startswith(";"):
            raise ValueError("text after a call")
        position = len(body) - len(rest.removeprefix(";").lstrip())
    return calls


def parse_mistral(body: str) -> list[ToolCall]:
    if body.startswith("["):
        values = json.loads(body)
        return [tool_call(value, "arguments") for value in values]
    calls = []
    for part in filter(None, body.split("[TOOL_CALLS]")):
        name, found, arguments = part.partition(ARGUMENTS)
        if not found:
            raise ValueError(f"no {ARGUMENTS}")
        calls.append(tool_call({"name": name.strip(), "arguments": json.loads(arguments)}, "arguments"))
    return calls


def tool_call(value: Any, *keys: str) -> ToolCall:
    """The call of a JSON object with a name and arguments under one of the keys. ValueError if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = next((value[key] for key in keys if key in value), {})
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


# The keys in the order in which templates ask for them; calls with another order are parsed as a whole.
CALL = r'(?P<object>\{)\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
# [TOOL_CALLS][{…}, or {…} after a comma, or [TOOL_CALLS]name[ARGS]. Quantifiers are possessive (+), so that the time is
# linear in the whitespace, which a model may generate without end.
NAME_CHARACTER = r'[^"\\\[\]{}\s]'
MISTRAL_CALL = (
    r'\s*+(?:,\s*+)?(?:\[TOOL_CALLS\]\s*+)?(?:\[\s*+)?(?:(?P<object>\{)\s*"name"\s*:\s*")?'
    rf"(?P<name>(?:{NAME_CHARACTER}++(?:\s++(?={NAME_CHARACTER}))?+)*+)"
    r'(?(object)"\s*,\s*"arguments"\s*:|\s*\[ARGS\])\s*(?=\{)'
)

STYLES = {
    "hermes": ToolStyle(
        "<tool_call>", "</tool_call>", None,
        re.compile(rf"\s*<tool_call>\s*{CALL}"), None, "</tool_call>", parse_hermes,
        CallSyntax('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),
    ),
    "llama3": ToolStyle(
        "<|python_tag|>", None, "{",
        re.compile(rf"\s*(?:;\s*)?(?:<\|python_tag\|>\s*)?{CALL}"), ";", None, parse_llama3,
        CallSyntax('{"name": ', ', "parameters": ', "}", "; "),
    ),
    "mistral": ToolStyle(
        "[TOOL_CALLS]", None, '[{"',
        re.compile(MISTRAL_CALL), ",", "]", parse_mistral,
        CallSyntax('{"name": ', ', "arguments": ', "}", ", ", "[", "]"), special=True,
    ),
}  # fmt: skip
