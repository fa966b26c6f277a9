"""Results of tools are data: what could end their message, begin another one or look like a call is escaped.

The text of a result comes from a document, a database, a program or another server. Special tokens in it are encoded
as their characters (regard/text/chat.py). Two kinds of marks remain: added tokens that are not special, such as
`<tool_call>` in some vocabularies, and marks that a chat template writes as ordinary text, as `</tool_response>` or
`USER:`. All of them are found in the tokenizer and in the source of the template; their first character is replaced.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from regard.text.tokenizer import Tokenizer
from regard.text.tool_styles import ARGUMENTS, STYLES

TEMPLATE_MARK = re.compile(
    r"</?[\w|｜▁:.-][^<>\s'\"{}]{0,60}>"  # <|im_start|>, </tool_response>
    r"|\[/?[A-Z_]{2,40}\]"  # [INST]
    r"|#{2,6} ?[A-Za-z]{3,40}:?"  # ### Response:
    r"|\b[A-Z]{4,20}:"  # USER:
    r"|\b(?:User|Assistant|Human|System):"
)
ALWAYS = {
    *(mark for style in STYLES.values() for mark in (style.begin, style.end) if mark), ARGUMENTS,
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
}  # fmt: skip
MAX_DEPTH = 100  # of JSON in a prompt
ESCAPES = {"<": "&lt;", "[": "&#91;"}


@lru_cache(maxsize=16)
def marks_of(tokenizer: Tokenizer) -> re.Pattern[str]:
    """What is escaped in results for a model."""
    added = (token.content for token in tokenizer.core.get_added_tokens_decoder().values())
    written = TEMPLATE_MARK.findall(tokenizer.chat_template or "")
    return pattern_of({*ALWAYS, *written, *(token for token in added if re.search(r"\w", token))})


def pattern_of(marks: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=lambda mark: (-len(mark), mark)))), re.IGNORECASE)


def as_data(text: str, marks: re.Pattern[str]) -> str:
    """The text with the first character of every mark replaced."""
    return marks.sub(lambda found: escaped(found[0]), text)


def escaped(mark: str) -> str:
    return ESCAPES.get(mark[0], f"\\{mark[0]}") + mark[1:]


def escaped_strings(value: Any, escape: Callable[[str], str], depth: int = 0) -> Any:
    """A value of JSON with all its strings escaped, also the keys of objects. What is nested too deep becomes …"""
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(key): escaped_strings(item, escape, depth + 1) for key, item in value.items()}
    return [escaped_strings(item, escape, depth + 1) for item in value] if isinstance(value, list) else value
