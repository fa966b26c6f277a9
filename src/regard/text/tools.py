"""Tool calls in the text that a model generates, in the styles of its family (`regard.text.tool_styles`).

The text of a model is not trusted: what does not parse as a call of an offered tool stays text.
"""

import json
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from regard.text.detokenizer import overlap
from regard.text.tool_styles import STYLES, ToolCall, tool_style


class ToolDelta(NamedTuple):
    text: str
    calls: tuple[ToolCall, ...]


def parse_tool_calls(text: str, style: str, tools: Collection[str]) -> ToolDelta:
    """The text without its calls, and the calls. tools: names of the offered tools; other calls stay text."""
    stream = ToolStream(style, tools)
    first, last = stream.push(text), stream.finish()
    return ToolDelta(first.text + last.text, first.calls + last.calls)


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
