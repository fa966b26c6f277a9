"""Conversations as tokens, with weight 1 for the assistant's tokens and 0 for all others.

The ids are those that the model's own chat template produces. The tokens of an assistant message are those between the
conversation before it, with the generation prompt, and the conversation up to its end. A template that rewrites earlier
messages when later ones are added cannot be trained on in this way and is refused.
"""

from typing import Any

import numpy as np

from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer


def tokenize_chat(messages: Any, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`ids` and `weights` of a conversation."""
    messages = checked_messages(messages)
    ids = encode_chat(tokenizer, messages, add_generation_prompt=False)
    weights = np.zeros(len(ids), np.float32)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = encode_chat(tokenizer, messages[:index], add_generation_prompt=True)
        until = encode_chat(tokenizer, messages[: index + 1], add_generation_prompt=False)
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
    return {"ids": np.array(ids, np.int64), "weights": weights}


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"`messages` must be a list with at least one message, found {messages!r:.60}")
    for message in messages:
        valid = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not valid or not isinstance(message.get("content"), str):
            raise ValueError(
                f"a message needs `role` (user, assistant, system …) and `content` (a string); found {message!r:.80}"
            )
    return list(messages)
