"""Tool calls in the text that a model generates, in the styles of its family.

    hermes    <tool_call>{"name": "f", "arguments": {…}}</tool_call>, between text, several times (Hermes, Qwen)
    llama3    {"name": "f", "parameters": {…}}, the whole output, several separated by ; (Llama 3)
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {…}}, …] or [TOOL_CALLS]f[ARGS]{…} after text (Mistral)

The text of a model is not trusted: what does not parse as a call of an offered tool stays text.
"""

import json
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from regard.text.detokenizer import overlap

DECODER = json.JSONDecoder()
ARGUMENTS = "[ARGS]"


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object


class ToolDelta(NamedTuple):
    text: str
    calls: tuple[ToolCall, ...]


class ToolStyle(NamedTuple):
    begin: str  # starts calls anywhere in the text
    end: str | None  # ends them; None: they reach to the end of the output
    bare: str | None  # an output that begins with it may be calls as a whole, without the `begin` marker
    parse: Callable[[str], list[ToolCall]]  # raises ValueError
    syntax: "CallSyntax"


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


def parse_tool_calls(text: str, style: str, tools: Collection[str]) -> ToolDelta:
    """The text without its calls, and the calls. tools: names of the offered tools; other calls stay text."""
    stream = ToolStream(style, tools)
    first, last = stream.push(text), stream.finish()
    return ToolDelta(first.text + last.text, first.calls + last.calls)


def tool_style(chat_template: str | None) -> str | None:
    """The style in which a model with this chat template calls tools; None if it knows none of them."""
    marks = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": '"parameters"'}
    template = chat_template or ""
    if "tools" not in template or "<function=" in template:  # calls as XML, by Qwen3-Coder
        return None
    return next((style for style, mark in marks.items() if mark in template), None)


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


class ToolStream:
    """Separates text and calls while they are generated. Text is held back while it may belong to a call.

    Whitespace before a call is dropped. The result does not depend on how the text is split into pushes.
    """

    def __init__(self, style: str, tools: Collection[str]):
        self.style, self.tools = STYLES[style], tools
        self.held = ""  # not returned yet
        self.inside = False  # the held text begins with calls
        self.started = self.called = False  # text has been returned; a call has been returned since

    def push(self, text: str) -> ToolDelta:
        """The text and the calls that this text completes."""
        result, calls = "", ()
        self.held += text
        while self.held:
            if not self.inside:
                found = self.find_begin()
                if found is None:
                    return ToolDelta(result + self.release(), calls)
                text = self.held[:found].rstrip()  # whitespace before a call is dropped with it
                self.held, self.inside = self.held[len(text) :], True
                result += self.emit(text)
            end = self.style.end
            stop = -1 if end is None else self.held.find(end)
            if end is None or stop < 0:
                break
            delta = self.close(self.held[: stop + len(end)])
            self.held = self.held[stop + len(end) :]
            result, calls = result + delta.text, calls + delta.calls
        return ToolDelta(result, calls)

    def finish(self) -> ToolDelta:
        """What is left at the end of the output."""
        held, self.held = self.held, ""
        if self.inside:
            return self.close(held)
        return ToolDelta("" if self.called and not held.strip() else self.emit(held), ())

    def find_begin(self) -> int | None:
        """The index in the held text at which calls begin, or None."""
        start, bare = self.held.lstrip(), self.style.bare
        if bare is not None and not self.started and not self.called and start.startswith(bare):
            return len(self.held) - len(start)
        found = self.held.find(self.style.begin)
        return None if found < 0 else found

    def release(self) -> str:
        """The held text that cannot be the beginning of a call, nor whitespace before one."""
        keep = overlap(self.held, self.style.begin)
        start, bare = self.held.lstrip(), self.style.bare
        if bare is not None and not self.started and not self.called and bare.startswith(start):
            keep = len(self.held)
        text = self.held[: len(self.held) - keep].rstrip()
        self.held = self.held[len(text) :]
        return self.emit(text)

    def emit(self, text: str) -> str:
        text = text.lstrip() if self.called and not self.started else text
        self.started = self.started or bool(text)
        self.called = self.called and not text
        return text

    def close(self, whole: str) -> ToolDelta:
        """The calls in `whole`, a text from a `begin` marker on; the text itself if it does not parse."""
        self.inside = False
        body = whole.strip().removeprefix(self.style.begin).removesuffix(self.style.end or "").strip()
        try:
            calls = self.style.parse(body)
        except (ValueError, RecursionError):
            calls = []
        if not calls or any(call.name not in self.tools for call in calls):
            return ToolDelta(self.emit(whole), ())
        self.called = True
        return ToolDelta("", tuple(calls))


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


STYLES = {
    "hermes": ToolStyle(
        "<tool_call>", "</tool_call>", None, parse_hermes,
        CallSyntax('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),
    ),
    "llama3": ToolStyle(
        "<|python_tag|>", None, "{", parse_llama3, CallSyntax('{"name": ', ', "parameters": ', "}", "; ")
    ),
    "mistral": ToolStyle(
        "[TOOL_CALLS]", None, '[{"', parse_mistral, CallSyntax('{"name": ', ', "arguments": ', "}", ", ", "[", "]")
    ),
}  # fmt: skip
