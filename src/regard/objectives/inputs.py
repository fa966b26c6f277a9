"""The inputs of encoders: a text, a pair of texts, words with labels, an image or a signal, as arrays and as tensors.

Token sequences have the special tokens of the tokenizer, such as [CLS] and [SEP]. A sequence that is too long loses its
last ordinary tokens and keeps all special ones; of a pair, the longer sequence is shortened first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item, pad_items
from regard.data.sources.base import Example, Examples, shown
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.objectives.base import Columns, padded_layout
from regard.objectives.text import text_of
from regard.parts.block import Losses
from regard.parts.frames import Frames
from regard.parts.input import Tokens
from regard.parts.patches import Patches
from regard.spec import require
from regard.text.tokenizer import Encoded, Tokenizer


def encode_input(example: Example, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`image`; or `ids` and `sequences` of a `text`, and also `types` of the pair `first` and `second`.

    The image is that of the example, or its `signal` (channels, frames), such as a spectrogram.
    """
    if "image" in example or "signal" in example:
        return {"image": np.asarray(example["image"] if "image" in example else example["signal"], np.float32)}
    if "first" in example:
        encoded = encode_pair(tokenizer, text_of(example, "first"), text_of(example, "second"))
        return token_columns(encoded) | {"types": np.array(encoded.types, np.int64)}
    encoded = tokenizer.encode_sequences(text_of(example, "text"))
    if not encoded.ids:
        raise ValueError(f"a text of this example has no tokens: {shown(example)}; remove it")
    return token_columns(encoded)


def encode_pair(tokenizer: Tokenizer, first: str, second: str) -> Encoded:
    """The pair with the special tokens of the tokenizer. If it has none between the two, its sep or eos token separates
    them."""
    encoded = tokenizer.encode_sequences(first, second)
    sides = np.array(encoded.sequences)
    border = int((sides != 1).cumprod().sum())  # the index of the first token of the second sequence
    if border and sides[border - 1] < 0:
        return encoded
    token = tokenizer.special_tokens_map.get("sep_token")
    separator = tokenizer.eos if token is None else tokenizer.core.token_to_id(token)
    require(
        separator is not None,
        "this tokenizer has no token that separates the two texts of a pair, neither sep_token nor eos_token; use "
        "another tokenizer, or join the texts into one (`text`)",
    )
    assert separator is not None

    def insert(values: list[int], value: int) -> list[int]:
        return [*values[:border], value, *values[border:]]

    return Encoded(
        insert(encoded.ids, separator),
        insert(encoded.types, 0),
        insert(encoded.sequences, -1),
        insert(encoded.words, -1),
    )


def token_columns(encoded: Encoded) -> dict[str, np.ndarray]:
    """`ids`, and `sequences`: 0 or 1 for the tokens of the first or second sequence, -1 for special tokens."""
    return {"ids": np.array(encoded.ids, np.int64), "sequences": np.array(encoded.sequences, np.int64)}


def truncate(columns: Columns, length: int) -> Item:
    """The columns with at most `length` tokens."""
    if "ids" not in columns or len(columns["ids"]) <= length:
        return columns
    sequences = columns["sequences"]
    counts = [int((sequences == number).sum()) for number in (0, 1)]
    remaining = length - (len(sequences) - sum(counts))
    require(
        remaining >= 0, f"data.length={length} is too short for the special tokens of the tokenizer; raise data.length"
    )
    shorter = min(min(counts), remaining // 2)
    kept = [shorter, remaining - shorter] if counts[0] <= counts[1] else [remaining - shorter, shorter]
    keep = sequences < 0
    for number in (0, 1):
        keep[np.flatnonzero(sequences == number)[: kept[number]]] = True
    return {name: array[keep] if array.shape == sequences.shape else array for name, array in columns.items()}


def collate_inputs(items: Sequence[Item], tokenizer: Tokenizer) -> dict[str, Tensor]:
    """`images`, or `tokens` with `valid` and, for pairs, `types`."""
    if "image" in items[0]:
        return {"images": stack_images(items)}
    tokens, valid = pad_items(items, "ids", tokenizer.pad or 0)
    types = {"types": pad_items(items, "types")[0]} if "types" in items[0] else {}
    return {"tokens": tokens, "valid": valid, **types}


def stack_images(items: Sequence[Item]) -> Tensor:
    shapes = sorted({item["image"].shape for item in items})
    if len(shapes) > 1:
        raise ValueError(f"images of one batch have the shapes {shapes[0]} and {shapes[1]}; resize them to one size")
    return torch.from_numpy(np.stack([item["image"] for item in items]))


def stack_labels(items: Sequence[Item], name: str = "label") -> Tensor:
    return torch.from_numpy(np.stack([item[name] for item in items]))


def check_first_example(model: Model, examples: Examples) -> None:
    """Raise SpecError if the model has another kind of input than the first example, or another size of images."""
    input, example = model.input if isinstance(model, Encoder) else None, examples.example(0)
    if isinstance(input, Patches):
        found = f"examples have {', '.join(example)}"
        require("image" in example, f"the model takes images, but {found}; use another source")
        expected, shape = (input.channels, *input.image), np.shape(example["image"])
        require(
            shape == expected or input.any_size and shape[:1] == expected[:1],
            f"the images of {examples.name} have the shape {shape}, and the model takes {expected}; set "
            f"model.input.image={list(shape[1:])} and model.input.channels={shape[0] if shape else 0}, or resize them",
        )
    elif isinstance(input, Frames):
        found, shape = f"examples have {', '.join(example)}", np.shape(example.get("signal", ()))
        require("signal" in example, f"the model takes signals, but {found}; use another source")
        require(
            len(shape) == 2 and shape[0] == input.channels,
            f"the signals of {examples.name} have the shape {shape}, and the model takes ({input.channels}, frames); "
            "set model.input.channels",
        )
    else:
        require(
            not {"image", "signal"} & set(example),
            "the examples have images or signals, but the model takes tokens; use patches or frames as its input",
        )


def logits_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
    """Logits of images; or of tokens, with `valid` if rows are padded and `types` if they are pairs of sequences."""
    if "images" in batch:
        outputs = model(batch.images, outputs=True)
    else:
        types = batch.get("types") if has_types(model) else None
        outputs = model(batch.tokens, padded_layout(batch.get("valid")), types, outputs=True)
    return wide_logits(outputs.logits), outputs.losses


def has_types(model: nn.Module) -> bool:
    """Whether the types 0 and 1 of a pair have embeddings; RoBERTa, for example, has none."""
    module: Any = getattr(model, "module", model)  # that of DistributedDataParallel
    input = module.spec.input
    return isinstance(input, Tokens) and input.types > 1


def wide_logits(logits: Tensor) -> Tensor:
    """At least float32, for sums in the loss."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def label_options(labels: Sequence[str], count: int) -> Mapping[str, object]:
    """Options of a classification head with these names, or with `count` numbered labels."""
    if labels:
        return {"labels": len(labels), "label_names": list(labels)}
    return {"labels": count} if count else {}
