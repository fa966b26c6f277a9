"""A prompt with its completion as tokens, of which those of the completion count.

A prompt is a string, which a string follows directly, or a list of messages, which the model's chat template writes
with its generation prompt; its completion is the assistant's answer: a string, or the messages that follow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.objectives.chat import checked_messages
from regard.objectives.text import end_id
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer


def tokenize_completion(prompt: Any, completion: Any, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`ids` of both, and `weights`: 1 for the tokens of the completion with its end, 0 for those of the prompt."""
    before = prompt_ids(prompt, tokenizer)
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise ValueError(f"the prompt is a string, so its completion must be one; found {completion!r:.60}")
        after = [*tokenizer.encode(completion), end_id(tokenizer)]
    else:
        after = answer_ids(before, checked_messages(prompt), completion, tokenizer)
    weights = np.repeat(np.array([0, 1], np.float32), [len(before), len(after)])
    return {"ids": np.array(before + after, np.int64), "weights": weights}


def prompt_ids(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt, as those of a request for generation."""
    if isinstance(prompt, str):
        return [*tokenizer.prefix_ids, *tokenizer.encode(prompt)]
    if not isinstance(prompt, list | tuple):
        raise ValueError(f"`prompt` must be a string or a list of messages, found {prompt!r:.60}")
    return encode_chat(tokenizer, checked_messages(prompt), add_generation_prompt=True)


def answer_ids(before: Sequence[int], prompt: list[dict[str, Any]], answer: Any, tokenizer: Tokenizer) -> list[int]:
    """The tokens that the chat template writes after the prompt, with its generation prompt, for the answer."""
    answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else checked_messages(answer)
    ids = encode_chat(tokenizer, [*prompt, *answer], add_generation_prompt=False)
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
