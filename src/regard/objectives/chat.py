"""Conversations, and prompts with their completions, as tokens with weights.

The ids are those that the model's own chat template produces. In a conversation all tokens of the assistant have weight
1, and all others 0: those between the conversation before a message of the assistant, with the generation prompt, and
the conversation up to its end. A template that rewrites earlier messages when later ones are added cannot be trained on
in this way and is refused.

Of a prompt with its completion only the tokens of the completion have weight 1. The prompt is a string, which a string
follows directly, or a list of messages; its completion is then the answer of the assistant: a string, or messages, of
which again only those of the assistant count.

Messages of the assistant may have `tool_calls`, and examples may have `tools`, both in OpenAI's format. The template
writes them; the tokens of a call count like those of an answer, and its result is a message of role `tool`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.objectives.text import end_id
from regard.text.chat import encode_chat
from regard.text.messages import ToolList, checked_messages
from regard.text.tokenizer import Tokenizer


def tokenize_chat(messages: Any, tokenizer: Tokenizer, tools: ToolList | None = None) -> dict[str, np.ndarray]:
    """`ids` and `weights` of a conversation."""
    messages = checked_messages(messages)
    ids = encode_chat(tokenizer, messages, False, tools)
    return {"ids": np.array(ids, np.int64), "weights": assistant_weights(ids, messages, 0, tokenizer, tools)}


def assistant_weights(
    ids: Sequence[int], messages: list[dict[str, Any]], first: int, tokenizer: Tokenizer, tools: ToolList | None
) -> np.ndarray:
    """1 for the tokens of the assistant's messages, from message number `first` on; `ids` are those of all messages."""
    weights = np.zeros(len(ids), np.float32)
    for index, message in enumerate(messages):
        if index < first or message["role"] != "assistant":
            continue
        before = encode_chat(tokenizer, messages[:index], True, tools)
        until = encode_chat(tokenizer, messages[: index + 1], False, tools)
        if ids[: len(before)] != before or ids[: len(until)] != until:
            raise ValueError(
                f"the chat template writes message {index} differently as part of a longer conversation, so its tokens "
                "cannot be found; train on conversations that end with the first answer"
            )
        if not set(tokenizer.stop_ids) & set(ids[len(before) : len(until)]):
            raise ValueError(
                "the chat template does not end the assistant's messages with a stop token, so the model would never "
                "learn to stop; use a template that writes the eos token"
            )
        weights[len(before) : len(until)] = 1
    return weights


def tokenize_completion(
    prompt: Any, completion: Any, tokenizer: Tokenizer, tools: ToolList | None = None
) -> dict[str, np.ndarray]:
    """`ids` of both, and `weights`: 1 for the tokens of the completion with its end, 0 for those of the prompt."""
    before, messages = prompt_ids(prompt, tokenizer, tools), []
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise ValueError(f"the prompt is a string, so its completion must be one; found {completion!r:.60}")
        after = [*tokenizer.encode(completion), end_id(tokenizer)]
    else:
        messages, prompt = answer_messages(completion), checked_messages(prompt)
        after = answer_ids(before, prompt, messages, tokenizer, tools)
    ids = before + after
    if len(messages) > 1:
        weights = assistant_weights(ids, [*prompt, *messages], len(prompt), tokenizer, tools)
    else:
        weights = np.repeat(np.array([0, 1], np.float32), [len(before), len(after)])
    return {"ids": np.array(ids, np.int64), "weights": weights}


def answer_messages(answer: Any) -> list[dict[str, Any]]:
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else checked_messages(answer)
    for place, message in (("begin", messages[0]), ("end", messages[-1])):
        if message["role"] != "assistant":
            raise ValueError(f"a completion must {place} with a message of the assistant, not with {message!r:.80}")
    return messages


def prompt_ids(prompt: Any, tokenizer: Tokenizer, tools: ToolList | None = None) -> list[int]:
    """The tokens of a prompt, as those of a request for generation."""
    if isinstance(prompt, str):
        return [*tokenizer.prefix_ids, *tokenizer.encode(prompt)]
    if not isinstance(prompt, list | tuple):
        raise ValueError(f"`prompt` must be a string or a list of messages, found {prompt!r:.60}")
    return encode_chat(tokenizer, checked_messages(prompt), True, tools)


def answer_ids(
    before: Sequence[int], prompt: list[dict[str, Any]], answer: Sequence[dict[str, Any]], tokenizer: Tokenizer,
    tools: ToolList | None = None,
) -> list[int]:  # fmt: skip
    """The tokens that the chat template writes after the prompt, with its generation prompt, for the answer."""
    ids = encode_chat(tokenizer, [*prompt, *answer], False, tools)
    if ids[: len(before)] != list(before):
        raise ValueError(
            "the chat template writes the prompt differently when an answer follows, so the tokens of the answer "
            "cannot be found; use prompts and completions that are strings"
        )
    if not set(tokenizer.stop_ids) & set(ids[len(before) :]):
        raise ValueError(
            "the chat template does not end the answer with a stop token, so the model would never learn to stop; use "
            "a template that writes the eos token"
        )
    return ids[len(before) :]
