"""Tool calls in an output while it is generated: the name of a call, then its arguments piece by piece.

    text ──marker──▶ head ──name, "arguments":──▶ arguments ──}──▶ rest of the object ──▶ after ──separator──▶ head
      ▲                │ no such head: the calls are parsed as a whole                      │
      └────────────────┴───────────────────────────────────────────────────────────────────┘

Once the head of a call of an offered tool is complete it is a call, even if the output is cut off in its arguments or
they turn out not to be JSON: pieces cannot be withdrawn. Everything else that does not parse as a call stays text.
"""

from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

from regard.text.detokenizer import overlap
from regard.text.tool_styles import STYLES, ToolCall


class CallPiece(NamedTuple):
    """The name begins a call. Arguments continue the call that began last."""

    name: str | None
    arguments: str


class ToolDelta(NamedTuple):
    text: str
    pieces: tuple[CallPiece, ...]


class ParserMode(Enum):
    TEXT = auto()
    HEAD = auto()  # the held text begins with a call, or with calls that are parsed as a whole
    ARGUMENTS = auto()
    REST = auto()  # of the object that has the arguments
    AFTER = auto()


class JsonObject:
    """Finds the end of a JSON object while it is generated."""

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.in_string = self.escaped = False

    def scan(self, text: str) -> int:
        """The number of characters that belong to the object; depth 0: it is complete."""
        for i, char in enumerate(text, 1):
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped, self.in_string = char == "\\", char != '"'
            elif char == '"':
                self.in_string = True
            else:
                self.depth += (char in "{[") - (char in "}]")
                if self.depth == 0:
                    return i
        return len(text)


class ToolStream:
    """Separates text and calls while they are generated. Text is held back while it may belong to a call.

    Whitespace before a call is dropped. The result does not depend on how the text is split into pushes. single: what
    follows the first call is dropped.
    """

    def __init__(self, style: str, tools: Collection[str], single: bool = False):
        self.style, self.tools, self.single = STYLES[style], tools, single
        self.held = ""  # not returned yet
        self.mode = ParserMode.TEXT
        self.started = self.called = False  # text has been returned; a call has been returned since
        self.calls = 0  # begun
        self.calls_before_text: int | None = None
        self.object = JsonObject()
        self.resumed = self.listed = False  # a separator was found; the call is an object, which others may follow
        self.text, self.pieces = "", []  # of the current push

    def push(self, text: str) -> ToolDelta:
        self.held += text
        while self.held and self.advance():
            pass
        return self.take()

    def finish(self) -> ToolDelta:
        """What is left at the end of the output."""
        held, self.held = self.held, ""
        if self.single and self.calls:
            return self.take()
        if self.mode is ParserMode.HEAD:
            self.close(held)
        elif self.mode is not ParserMode.AFTER and (held.strip() or not self.called):  # AFTER: a part of a marker
            self.emit(held)
        return self.take()

    def take(self) -> ToolDelta:
        delta = ToolDelta(self.text, tuple(self.pieces))
        self.text, self.pieces = "", []
        return delta

    def advance(self) -> bool:
        """Whether something of the held text was taken, or the mode has changed."""
        if self.single and self.calls and self.mode in (ParserMode.TEXT, ParserMode.HEAD, ParserMode.AFTER):
            self.held = ""
            return False
        match self.mode:
            case ParserMode.TEXT:
                return self.in_text()
            case ParserMode.HEAD:
                return self.in_head()
            case ParserMode.ARGUMENTS:
                self.pieces.append(CallPiece(None, self.scan(ParserMode.REST if self.listed else ParserMode.AFTER)))
                self.object.depth = self.object.depth or 1  # of the object around the arguments
                return True
            case ParserMode.REST:
                self.scan(ParserMode.AFTER)
                return True
            case ParserMode.AFTER:
                return self.after_call()

    def scan(self, following: ParserMode) -> str:
        count = self.object.scan(self.held)
        found, self.held = self.held[:count], self.held[count:]
        self.mode = self.mode if self.object.depth else following
        return found

    def in_text(self) -> bool:
        found = self.find_begin()
        if found is None:
            self.release()
            return False
        text = self.held[:found].rstrip()  # whitespace before a call is dropped with it
        self.held, self.mode, self.resumed = self.held[len(text) :], ParserMode.HEAD, False
        self.emit(text)
        return True

    def in_head(self) -> bool:
        head = self.style.head.match(self.held)
        if head is not None and head["name"] in self.tools:
            self.begin(head["name"], "")
            self.listed = head["object"] is not None
            self.held, self.mode, self.object = self.held[head.end() :], ParserMode.ARGUMENTS, JsonObject()
            return True
        end = self.style.end
        stop = -1 if end is None else self.held.find(end)
        if end is None or stop < 0:
            return False
        whole, self.held = self.held[: stop + len(end)], self.held[stop + len(end) :]
        self.close(whole)
        return True

    def after_call(self) -> bool:
        found, style = self.held.lstrip(), self.style
        markers = [marker for marker in (style.separator, style.closing) if marker and self.listed]
        if any(marker.startswith(found) and marker != found for marker in markers):
            return False
        self.mode = ParserMode.TEXT
        if style.separator and self.listed and found.startswith(style.separator):
            self.mode, self.resumed = ParserMode.HEAD, True
        elif style.closing and self.listed and found.startswith(style.closing):
            self.held = found.removeprefix(style.closing)
        return True

    def find_begin(self) -> int | None:
        """The index in the held text at which calls begin, or None."""
        start, bare = self.held.lstrip(), self.style.bare
        if bare is not None and not self.started and not self.called and start.startswith(bare):
            return len(self.held) - len(start)
        found = self.held.find(self.style.begin)
        return None if found < 0 else found

    def release(self) -> None:
        """Return the held text that cannot be the beginning of a call, nor whitespace before one."""
        keep = overlap(self.held, self.style.begin)
        start, bare = self.held.lstrip(), self.style.bare
        if bare is not None and not self.started and not self.called and bare.startswith(start):
            keep = len(self.held)
        text = self.held[: len(self.held) - keep].rstrip()
        self.held = self.held[len(text) :]
        self.emit(text)

    def emit(self, text: str) -> None:
        text = text.lstrip() if self.called and not self.started else text
        if text and self.calls_before_text is None:
            self.calls_before_text = self.calls
        self.started = self.started or bool(text)
        self.called = self.called and not text
        self.text += text

    def begin(self, name: str, arguments: str) -> None:
        self.pieces.append(CallPiece(name, arguments))
        self.called = True
        self.calls += 1

    def close(self, whole: str) -> None:
        """Return the calls in `whole`, a text from a marker or separator on; the text itself if it does not parse."""
        self.mode = ParserMode.TEXT
        style = self.style
        body = whole.strip().removeprefix(style.begin).removesuffix(style.end or "").strip()
        if self.resumed:  # inside of a list of calls
            body = style.syntax.opening + body.removeprefix(style.separator or "").lstrip()
        try:
            calls: list[ToolCall] = style.parse(body)
        except (ValueError, RecursionError):
            calls = []
        if not calls or any(call.name not in self.tools for call in calls):
            self.emit(whole)
            return
        for call in calls[:1] if self.single else calls:
            self.begin(*call)
