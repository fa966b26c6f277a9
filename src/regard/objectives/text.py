"""The texts of examples, and the special tokens of their documents."""

from typing import Any

import numpy as np

from regard.data.sources.base import Example, shown
from regard.data.spans import unmarked_text
from regard.text.tokenizer import Tokenizer


def text_of(example: Example, key: str) -> str:
    if not isinstance(example.get(key), str):
        raise ValueError(f"`{key}` of an example must be a string, found {example.get(key)!r:.60}")
    return example[key]


def plain_text(objective: Any, example: Example) -> str:
    """The text of an example; of a conversation in spans, the text without its special tokens."""
    if "spans" in example:
        return unmarked_text(example["spans"])
    if "text" not in example:
        raise ValueError(f"objective {objective.kind} needs examples with text; this one has {', '.join(example)}")
    return text_of(example, "text")


def require_tokens(objective: Any, tokens: np.ndarray, example: Example) -> None:
    if not len(tokens):
        raise ValueError(
            f"objective {objective.kind}: this example has no tokens, so there is nothing to train on: "
            f"{shown(example)}; remove it"
        )


def end_id(tokenizer: Tokenizer) -> int:
    if tokenizer.eos is None:
        raise ValueError("this tokenizer has no eos token to end a document with; use another tokenizer")
    return tokenizer.eos


def start_id(tokenizer: Tokenizer) -> int:
    """The id that starts the output of an encoder-decoder; without one of its own, bos, else pad."""
    for id in (tokenizer.decoder_start, tokenizer.bos, tokenizer.pad):
        if id is not None:
            return id
    raise ValueError(
        "this tokenizer has no token that starts the output of a decoder; add a bos or a pad token, or set "
        "decoder_start_token_id in generation_config.json"
    )
