"""Chat templates: messages to the one text that a model was trained on.

A template comes with the model, never with a request, and is rendered in a bounded sandbox (sandbox.py). The default
one writes each turn after the marker of its role and a space, so that its first word is the same token as inside a
text, and closes what the assistant says with `<|end|>`. What the model answers therefore begins with that space.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from regard.text.sandbox import Sandbox
from regard.text.tokenizer import Tokenizer

PRIVATE = range(0xF0000, 0x110000)  # characters without a meaning of their own
USER, ASSISTANT, SYSTEM, END, PAD = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"

DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ("user", "assistant", "system") -%}
{{- raise_exception("role " ~ message.role ~ " is unknown; use user, assistant or system") -}}
{%- endif -%}
{{- "<|" ~ message.role ~ "|> " ~ message.content | trim -}}
{%- if message.role == "assistant" %}{{ "<|end|>" }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif -%}
"""

REASONING = ("reasoning_content", "thinking", "reasoning")

# what a template's own mistakes raise; SyntaxError: Python cannot nest the loops that Jinja compiled for it
FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError, SyntaxError)


class ChatError(ValueError):
    """The template refused the messages, or was refused itself."""


def render(
    template: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = True,
    names: Mapping[str, str] | None = None,
) -> str:
    """The text of a conversation, ready for `Tokenizer.encode(text, special=True)`; `names` as `bos_token`."""
    sandbox = Sandbox()
    variables: dict[str, Any] = {
        **(names or {}),
        "messages": [_reasoned(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "tools": None,
        "documents": None,
        "raise_exception": _raise,
        "strftime_now": _now,
    }
    try:
        return sandbox.generate_bounded(template, variables)
    except TemplateError as error:
        raise ChatError(f"the chat template failed: {error.message}") from error
    except FAULTS as error:
        raise ChatError(f"the chat template failed on these messages: {error}") from error


def encode_chat(tokenizer: Tokenizer, messages: list[dict[str, Any]], reply: bool = True) -> list[int]:
    """The ids of a conversation; with `reply`, up to where the model speaks.

    A marker written in a message is only characters: private characters stand in for it while the template is rendered.
    """
    if tokenizer.chat_template is None:
        raise ChatError("this model has no chat template, so it was not made for conversation; continue a text instead")
    said = "\n".join(value for message in messages for value in message.values() if isinstance(value, str))
    found = [marker for marker in tokenizer.markers if marker in said]
    used = frozenset(said)
    unused = (char for char in map(chr, PRIVATE) if char not in used)
    markers = dict(zip(islice(unused, len(found)), found, strict=True))
    for char, marker in markers.items():
        messages = [{key: _replaced(value, marker, char) for key, value in message.items()} for message in messages]
    text = render(tokenizer.chat_template, messages, reply, tokenizer.names)
    ids: list[int] = []
    for part in re.split(f"([{''.join(markers)}])", text) if markers else [text]:
        ids += _continued(tokenizer, markers.get(part, part), part not in markers, ids)
    return ids


def _continued(tokenizer: Tokenizer, text: str, special: bool, before: list[int]) -> list[int]:
    """Ids of a text inside another: SentencePiece's kind would put a space before it if it stood alone."""
    ids, line = tokenizer.encode("\n" + text, special), tokenizer.encode("\n")
    return ids[len(line) :] if before and ids[: len(line)] == line else tokenizer.encode(text, special)


def _replaced(value: Any, old: str, new: str) -> Any:
    return value.replace(old, new) if isinstance(value, str) else value


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _reasoned(message: dict[str, Any]) -> dict[str, Any]:
    """What was thought before an answer is found under both of the names that templates have for it."""
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}
