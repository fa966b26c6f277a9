"""Chat templates: a list of messages as the string that the model was trained on.

A template comes with the model, never with a request, and runs in a bounded sandbox (jinja_sandbox.py). The default
template writes each message as the special token of its role, a space and the content, and ends assistant messages
with `<|end|>`. With the space, the first word has the same token as inside a sentence; a reply of the model therefore
starts with a space.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from regard.text.jinja_sandbox import BoundedEnvironment
from regard.text.tokenizer import Tokenizer

PRIVATE_USE = range(0xF0000, 0x110000)  # Unicode code points without an assigned meaning
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

RESERVED = ("messages", "add_generation_prompt", "tools", "raise_exception", "strftime_now")  # set by `render`
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# Errors in a template itself. SyntaxError: Jinja compiles nested loops to Python, which limits their depth.
TEMPLATE_FAULTS = (
    TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError, SyntaxError,
)  # fmt: skip


class ChatError(ValueError):
    """The template failed on the messages, or exceeded a limit of the sandbox."""


def render(
    template: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = True,
    special_tokens_map: Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as a string for `Tokenizer.encode(text, special=True)`.

    tools: those that the model may call, in OpenAI's format: {"type": "function", "function": {"name", …}}.
    variables: others that the template reads, such as `enable_thinking`.
    """
    values: dict[str, Any] = {
        "documents": None,
        **(variables or {}),
        **(special_tokens_map or {}),
        "messages": [_with_reasoning(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    try:
        return BoundedEnvironment().render_bounded(template, values)
    except TemplateError as error:
        raise ChatError(f"the chat template failed: {error.message}") from error
    except TEMPLATE_FAULTS as error:
        raise ChatError(f"the chat template failed on these messages: {error}") from error


def refused_variable(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> str | None:
    """Why the chat template cannot have one of these variables; None if it can have all."""

    def is_reserved(name: str) -> bool:
        return name in RESERVED or name.endswith("_token")  # such as bos_token

    free = sorted(name for name in _variables_of(tokenizer.chat_template or "") if not is_reserved(name))
    for name in variables:
        if is_reserved(name):
            return f"the variable {name!r} of the chat template is set already; leave it out"
        if name not in free:
            known = f"it has {', '.join(free)}" if free else "leave it out"
            return f"the chat template of this model has no variable {name!r}; {known}"
    return None


@lru_cache(maxsize=64)
def _variables_of(template: str) -> frozenset[str]:
    """The names that a template reads and does not set."""
    try:
        return frozenset(find_undeclared_variables(BoundedEnvironment().parse(template)))
    except TemplateError as error:
        raise ChatError(f"the chat template failed: {error.message}") from error
    except TEMPLATE_FAULTS as error:
        raise ChatError(f"the chat template cannot be read: {error}") from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    image_token: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of a conversation; the generation prompt starts the assistant's next message.

    tools, variables: as for `render`. image_token: stands for each image, a part {"type": "image"} of the content of a
    message. A special token typed in a message, a tool or a variable is encoded as its characters: while the template
    is rendered, a private-use character replaces it.
    """
    if tokenizer.chat_template is None:
        raise ChatError("this model has no chat template; let it continue a prompt instead of answering messages")
    content = "\n".join(strings_in([messages, tools, variables]))
    typed = [token for token in tokenizer.all_special_tokens if token in content]
    characters = frozenset(content)
    unused = (char for char in map(chr, PRIVATE_USE) if char not in characters)
    placeholders = dict(zip(islice(unused, len(typed)), typed, strict=True))
    for char, token in placeholders.items():
        messages, tools, variables = (_replace(value, token, char) for value in (messages, tools, variables))
    arguments = (add_generation_prompt, tokenizer.special_tokens_map, tools, variables)
    if image_token is None or not (images := _images_in(messages)):
        text = render(tokenizer.chat_template, messages, *arguments)
    else:
        image = next(unused, None)
        if image is None:
            raise ChatError("the messages have every character of Unicode's private use area; remove some")
        text = _render_images(tokenizer.chat_template, messages, images, image_token, image, arguments)
    ids: list[int] = []
    for part in re.split(f"([{''.join(placeholders)}])", text) if placeholders else [text]:
        ids += encode_part(tokenizer, placeholders.get(part, part), special=part not in placeholders, first=not ids)
    return ids


def _images_in(messages: list[dict[str, Any]]) -> int:
    contents = (message.get("content") for message in messages)
    return sum(part["type"] == "image" for parts in contents if isinstance(parts, list) for part in parts)


def _render_images(
    template: str, messages: list[dict[str, Any]], images: int, token: str, char: str, arguments: tuple
) -> str:
    """The conversation with an image token per image.

    Templates of models that read images write the tokens of content parts. Any other gets strings, with `char`, which
    the messages do not have, in place of each image.
    """
    try:
        text = render(template, messages, *arguments)
        if text.count(token) == images:
            return text
    except ChatError:  # it takes strings
        pass
    joined = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(char if part["type"] == "image" else part["text"] for part in content)
        joined.append(message | {"content": content})
    return render(template, joined, *arguments).replace(char, token)


def encode_part(tokenizer: Tokenizer, text: str, special: bool, first: bool) -> list[int]:
    """Ids of a part of a longer string, without the space that SentencePiece adds at the start of a string."""
    if not first:
        ids, newline = tokenizer.encode("\n" + text, special), tokenizer.encode("\n")
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
    return tokenizer.encode(text, special)


def is_conversation(messages: Any) -> bool:
    """Whether it is one conversation, a string or a list of messages, and not a list of conversations."""
    return isinstance(messages, str) or (len(messages) > 0 and isinstance(messages[0], Mapping))


def strings_in(value: Any) -> Iterator[str]:
    """All strings in messages or tools, also the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _replace(value: Any, old: str, new: str) -> Any:
    """The value with every occurrence of `old` in its strings replaced."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {_replace(key, old, new): _replace(item, old, new) for key, item in value.items()}
    return [_replace(item, old, new) for item in value] if isinstance(value, list | tuple) else value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if it has one, under both keys that templates use."""
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
