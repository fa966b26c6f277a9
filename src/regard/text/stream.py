"""Ids to text as they come: never half a character, never a piece of a stop string.

A token is often part of a character (an emoji is four bytes) and its text can depend on its left neighbour. So a short
window of ids is decoded with and without its newest ones, and their difference is the new text; it is let out once it
ends on a whole character. Of that text, what could still be tidied is held back, and of the rest the longest end that
could begin a stop string.
"""

from collections.abc import Sequence
from typing import Protocol

from regard.text.tidy import settled, tidied
from regard.text.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what the decoder writes for bytes that are no character, or none yet
NEIGHBOURS = 8


class Detokenizer:
    """`stopped` is the stop string that was met, or None; the text then ends just before it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), after: Sequence[int] = ()):
        """`after`: the ids that the text continues, if it is one text with them."""
        if "" in stops:
            raise ValueError("a stop string is empty; leave it out, or give the text to stop at")
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.stopped: str | None = None
        whole = not tokenizer.rough(neighbours := list(after[-NEIGHBOURS:])).endswith(UNFINISHED)
        self._context = neighbours if whole else []  # ids whose text is out already: the left neighbours of the next
        self._fresh: list[int] = []  # ids whose text ends in an unfinished character
        self._out = 0  # how many characters of the fresh ids' text are out nevertheless
        self._rough = ""  # text that is not tidied yet
        self._held = ""

    def push(self, id: int) -> str:
        """Take the next id; return the text that is now certain."""
        if self.stopped is not None:
            return ""
        self._fresh.append(id)
        text = self._fresh_text()
        certain = text.rstrip(UNFINISHED)  # byte fallback writes one for each byte that it has
        new, self._out = certain[self._out :], len(certain)
        if certain == text:
            self._context, self._fresh, self._out = (self._context + self._fresh)[-NEIGHBOURS:], [], 0
        return self._release(self._settle(new))

    def finish(self) -> str:
        """No more ids will come: return what was held back."""
        if self.stopped is not None:
            return ""
        text = self._release(self._settle(self._fresh_text()[self._out :], last=True))
        rest = self._held if self.stopped is None else ""
        self._held, self._fresh, self._out = "", [], 0
        return text + rest

    def _fresh_text(self) -> str:
        known = self.tokenizer.rough(self._context)
        return self.tokenizer.rough(self._context + self._fresh)[len(known) :]

    def _settle(self, text: str, last: bool = False) -> str:
        if not self.tokenizer.tidy:
            return text
        text = self._rough + text
        cut = len(text) if last else settled(text)
        self._rough = text[cut:]
        return tidied(text[:cut])

    def _release(self, text: str) -> str:
        text = self._held + text
        met = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if met:
            at, self.stopped = min(met, key=lambda found: found[0])
            self._held = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class GeneratedToken(Protocol):
    """A token as an engine returns it. `finish` is set on the last one: "stop" for a stop id, else another reason."""

    @property
    def id(self) -> int: ...

    @property
    def finish(self) -> str | None: ...


class TextStream:
    """The text of one generated sequence, from its tokens.

    `finish` is None while the sequence grows, then "stop" after a stop id or a stop string, or the last token's reason.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), after: Sequence[int] = ()):
        """`after`: the ids of the prompt, if the new text continues its text and is no answer to it."""
        self._detokenizer = Detokenizer(tokenizer, stops, after)
        self.finish: str | None = None

    def push(self, token: GeneratedToken) -> str:
        """The text that is certain with this token; with the last one, all the rest. A stop id has no text."""
        text = "" if token.finish == "stop" else self._detokenizer.push(token.id)
        if token.finish is not None:
            text += self._detokenizer.finish()
        self.finish = "stop" if self._detokenizer.stopped is not None else token.finish
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a true beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
