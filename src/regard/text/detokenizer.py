"""Streaming detokenization: token ids to text, without parts of characters or of stop strings.

A token may hold part of a character (an emoji has four bytes), and its text may depend on the previous token. So a
short window of ids is decoded with and without the newest ids. The difference is the new text, which is released once
it ends in a complete character. Text that clean-up could still change is held back, and so is the longest suffix that
could start a stop string.
"""

from collections.abc import Sequence
from typing import Protocol

from regard.text.tokenizer import CLEAN_UP, Tokenizer, clean_up_tokenization

REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character
CONTEXT = 8  # ids; it may grow to twice as many before it is shortened, which costs another call of `decode`
CHARACTER_BYTES = 4  # at most, in UTF-8
CLEAN_UP_REACH = max(map(len, CLEAN_UP)) - 1  # characters that a replacement matches after its space


class Detokenizer:
    """`matched_stop` is the stop string that ended the text, or None; the text ends before it."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: str | Sequence[str] = (), prompt_ids: Sequence[int] = ()):
        """`prompt_ids`: the prompt that the text continues; with it, the space before the first word is kept."""
        stop_strings = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
        if "" in stop_strings:
            raise ValueError("a stop string is empty; remove it")
        self.tokenizer, self.stop_strings = tokenizer, tuple(stop_strings)
        self.matched_stop: str | None = None
        self._set_context(list(prompt_ids[-CONTEXT:]))
        if self._decode(self._context).endswith(REPLACEMENT):  # the prompt ends inside a character
            self._set_context([])
        self._pending: list[int] = []  # ids whose text ends in an incomplete character
        self._released = 0  # characters of the pending ids' text that were released already
        self._raw = ""  # text before clean-up
        self._held = ""  # text that could start a stop string

    def push(self, id: int) -> str:
        """Append an id; returns the text that is now final."""
        if self.matched_stop is not None:
            return ""
        self._pending.append(id)
        text = self._pending_text()
        complete = text.rstrip(REPLACEMENT)  # byte fallback decodes to one per incomplete byte
        new, self._released = complete[self._released :], len(complete)
        if complete == text:
            self._context, self._context_length = self._context + self._pending, self._context_length + len(text)
            self._pending, self._released = [], 0
            if len(self._context) > 2 * CONTEXT:
                self._set_context(self._context[-CONTEXT:])
        return self._cut_at_stop(self._clean_up(new))

    def finish(self) -> str:
        """End the stream; returns the text that was held back."""
        if self.matched_stop is not None:
            return ""
        text = self._cut_at_stop(self._clean_up(self._pending_text()[self._released :], last=True))
        held = self._held if self.matched_stop is None else ""
        self._held, self._pending, self._released = "", [], 0
        return text + held

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up=False)

    def _set_context(self, ids: list[int]) -> None:
        """ids: the last ones whose text was released.

        The first ids may be the end of a character. They are left out, because byte fallback decodes each byte of a run
        with an incomplete character to a REPLACEMENT, also those of the complete characters that follow.
        """
        text = self._decode(ids)
        for _ in range(CHARACTER_BYTES - 1):
            if text.startswith(REPLACEMENT):
                ids = ids[1:]
                text = self._decode(ids)
        self._context, self._context_length = ids, len(text)

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[self._context_length :]

    def _clean_up(self, text: str, last: bool = False) -> str:
        if not self.tokenizer.clean_up_tokenization_spaces:
            return text
        text = self._raw + text
        end = len(text) if last else clean_up_boundary(text)
        self._raw = text[end:]
        return clean_up_tokenization(text[:end])

    def _cut_at_stop(self, text: str) -> str:
        """The text up to the first stop string, or without the suffix that could start one."""
        text = self._held + text
        matches = [(index, stop) for stop in self.stop_strings if (index := text.find(stop)) >= 0]
        if matches:
            index, self.matched_stop = min(matches, key=lambda match: match[0])
            self._held = ""
            return text[:index]
        held = max((overlap(text, stop) for stop in self.stop_strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


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

    def __init__(self, tokenizer: Tokenizer, stop_strings: str | Sequence[str] = (), prompt_ids: Sequence[int] = ()):
        """`prompt_ids`: the prompt, if the new text continues it; empty if the new text is an answer in a chat."""
        self._detokenizer = Detokenizer(tokenizer, stop_strings, prompt_ids)
        self.finish: str | None = None

    def push(self, token: GeneratedToken) -> str:
        """The text that becomes final with this token; the last token releases all held text. A stop id has no text."""
        text = "" if token.finish == "stop" else self._detokenizer.push(token.id)
        if token.finish is not None:
            text += self._detokenizer.finish()
        self.finish = "stop" if self._detokenizer.matched_stop is not None else token.finish
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def clean_up_boundary(text: str) -> int:
    """An index at which `text` can be split so that cleaning up both parts equals cleaning up the whole.

    Every replacement begins with a space. The index is the last space with no other space in the CLEAN_UP_REACH
    characters before it, so no replacement that begins earlier extends past it.
    """
    index = text.rfind(" ")
    while index > 0 and " " in text[max(0, index - CLEAN_UP_REACH) : index]:
        index = text.rfind(" ", 0, index)
    return max(index, 0)
