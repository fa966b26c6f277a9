"""Labels of texts, pairs of texts, words and images, by a model with a classification head.

    p = softmax(logits)          a head with one output predicts a number, the logit itself

The inputs become batches as in training (objectives/inputs.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from regard.checkpoint.image_processor import ImageProcessor, is_image
from regard.data.batch import Batch
from regard.data.packing import Item
from regard.data.sources.base import Example
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Distilled
from regard.objectives.base import describe_model, takes_tokens
from regard.objectives.inputs import collate_inputs, encode_input, logits_of, token_columns, truncate
from regard.text.tokenizer import Tokenizer

BATCH = 32
ClassifierInput: TypeAlias = (
    "str | Path | tuple[str, str] | Example | Any"  # text, image file, pair, or an example with fields
)


@dataclass(frozen=True)
class Prediction:
    """A label with its probability, or the `value` that a head with one output predicts."""

    label: str | None = None
    probability: float | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)  # of all labels
    value: float | None = None


def classification_head(model: Model) -> Classification | Distilled:
    """The head of the model; ValueError if it is no classification head."""
    head = model.head if isinstance(model, Encoder) else None
    if not isinstance(head, Classification | Distilled):
        raise ValueError(
            f"this model is {describe_model(model)}, which has no labels; train a classification head: "
            "regard train --from MODEL --data labels.jsonl --head.kind=classification"
        )
    return head


@torch.inference_mode()
def classify(
    model: nn.Module,
    tokenizer: Tokenizer,
    inputs: Sequence[ClassifierInput],
    context: int | None = None,
    image_processor: ImageProcessor | None = None,
) -> list[Any]:
    """The Prediction of each input; if the head labels words, a list of them, one per word.

    context: sequences are truncated to this number of tokens, by default to the model's context.
    """
    spec: Any = model.spec
    head, limit = classification_head(spec), context or spec.context or spec.position.max_positions
    words = isinstance(head, Classification) and head.pool == "none"
    encode = encode_words if words else encode_input
    examples = [example_of(value, spec, words, image_processor) for value in inputs]
    items = [encode(example, tokenizer) for example in examples]
    if limit is not None:
        items = [truncate(item, limit) for item in items]
    names = head.label_names or tuple(map(str, range(head.labels)))
    predictions: dict[int, Any] = {}
    order = sorted(range(len(items)), key=lambda i: batch_key(items[i]))  # similar lengths together: little padding
    for _, group in groupby(order, key=lambda i: batch_key(items[i])[0]):  # texts and pairs have different fields
        indices = list(group)
        for start in range(0, len(indices), BATCH):
            chosen = indices[start : start + BATCH]
            logits = batch_logits(model, [items[i] for i in chosen], tokenizer)  # (B, labels) or (B, L, labels)
            for row, i in enumerate(chosen):
                found = logits[row]
                if words:
                    first = torch.from_numpy(items[i]["first"])
                    predictions[i] = [prediction(scores, names) for scores in found[: len(first)][first]]
                else:
                    predictions[i] = prediction(found, names)
    return [predictions[i] for i in range(len(items))]


def example_of(value: ClassifierInput, model: Model, words: bool, image_processor: ImageProcessor | None) -> Example:
    """The example of a text, a pair, an image or a list of words; an example is checked and returned."""
    if not takes_tokens(model):
        image: Any = value.get("image") if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and "signal" in value or isinstance(image, np.ndarray):
            return value if isinstance(value, Mapping) else {"image": image}
        if not is_image(image):
            raise ValueError(f"this model takes images; expected an image file, found {value!r:.80}")
        if image_processor is None:
            raise ValueError("the folder has no preprocessor_config.json, so images cannot be read; copy it there")
        return {"image": image_processor.read([image])[0].numpy()}
    if isinstance(value, str):
        value = {"text": value}
    elif isinstance(value, tuple) and len(value) == 2:
        value = {"first": value[0], "second": value[1]}
    fields = ("text", "tokens") if words else ("text", "first")
    if not isinstance(value, Mapping) or not any(name in value for name in fields):
        raise ValueError(f"this model takes texts; expected a string or a tuple of two strings, found {value!r:.80}")
    return value


def encode_words(example: Example, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`ids` and `sequences` of the words of an example or of its text, and `first`: True for a word's first token."""
    words = example["tokens"] if "tokens" in example else str(example["text"]).split()
    encoded = tokenizer.encode_words(list(words))
    indices = np.array(encoded.words, np.int64)
    return token_columns(encoded) | {"first": (indices >= 0) & (np.diff(indices, prepend=-1) != 0)}


def batch_key(item: Item) -> tuple[str, int]:
    """The fields of an item and the shape of its image, which all items of a batch share, and its length."""
    shape = item["image"].shape if "image" in item else ()
    return f"{sorted(item)} {shape}", len(item.get("ids", ()))


def batch_logits(model: nn.Module, items: list[Item], tokenizer: Tokenizer) -> Tensor:
    device = next(model.parameters()).device
    return logits_of(model, Batch(**collate_inputs(items, tokenizer)).to(device))[0].cpu()


def prediction(logits: Tensor, names: Sequence[str]) -> Prediction:
    """logits (labels,)"""
    if len(names) == 1:
        return Prediction(value=float(logits[0]))
    probabilities = logits.double().softmax(-1).tolist()
    best = int(logits.argmax())
    return Prediction(names[best], probabilities[best], dict(zip(names, probabilities, strict=True)))
