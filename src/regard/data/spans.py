"""A document as spans of text, each with a loss weight for its tokens."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from regard.text.chat import END
from regard.text.tokenizer import Tokenizer


class Span(NamedTuple):
    text: str
    weight: float = 1.0
    special: bool = False  # the text is a special token such as <|user|>; in other spans it is encoded as characters


def tokenize_spans(spans: Iterable[Span], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`ids` and `weights` of all tokens."""
    ids: list[int] = []
    weights: list[float] = []
    for span in spans:
        new = [special_token_id(span.text, tokenizer)] if span.special else tokenizer.encode(span.text)
        ids += new
        weights += [span.weight] * len(new)
    return {"ids": np.array(ids, np.int64), "weights": np.array(weights, np.float32)}


def special_token_id(token: str, tokenizer: Tokenizer) -> int:
    """The id of a special token; `<|end|>` is the tokenizer's eos, if it has one."""
    id = tokenizer.eos if token == END and tokenizer.eos is not None else tokenizer.core.token_to_id(token)
    if id is None:
        raise ValueError(
            f"the data has the special token {token}, which is not in this tokenizer's vocabulary; train a tokenizer "
            "(tokenizer.by='bpe'), or use plain text and a tokenizer with an eos token"
        )
    return id


def unmarked_text(spans: Iterable[Span]) -> str:
    """The text of spans without special tokens."""
    return "".join(span.text for span in spans if not span.special).strip()


def strings_of(value: Any) -> Iterator[str]:
    """All strings in an example, for training a tokenizer; not special tokens, and not the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Span):
        yield from () if value.special else (value.text,)
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from () if name == "role" else strings_of(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from strings_of(entry)
