"""The served model as the subject of instruments: a copy of its modules that shares the weights."""

import weakref
from typing import Any, NamedTuple

from regard.lens.recorded_attention import copy_with_shared_tensors
from regard.models.decoder import DecoderModule
from regard.text.tokenizer import Tokenizer


class Subject(NamedTuple):
    """A decoder that instruments read, and its tokenizer."""

    name: str
    model: DecoderModule
    tokenizer: Tokenizer


COPIES: weakref.WeakKeyDictionary[DecoderModule, DecoderModule] = weakref.WeakKeyDictionary()


def subject_of(name: str, model: Any, tokenizer: Tokenizer) -> Subject | None:
    """None for a model that is no decoder."""
    if not isinstance(model, DecoderModule):
        return None
    if model not in COPIES:
        copy = copy_with_shared_tensors(model).eval()
        assert isinstance(copy, DecoderModule)
        COPIES[model] = copy
    return Subject(name, COPIES[model], tokenizer)
