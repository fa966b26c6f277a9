"""Classify a sequence, an image or every token of a sequence; or score how well a pair of sequences matches.

    classification   loss = Σ -log softmax(logits)[label]
    relevance        loss = Σ -y log σ(s) - (1 - y) log(1 - σ(s))        one score per pair, y in [0, 1]

Each row counts once; if every token has a label, each token counts by its weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item, pad_items
from regard.data.sources.base import Example, Examples, read_examples
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Distilled
from regard.objectives.base import (
    Columns,
    LossResult,
    Objective,
    add_losses,
    padded_layout,
    require_keys,
    require_model,
)
from regard.objectives.next_token import text_of
from regard.parts.block import Losses
from regard.spec import require
from regard.text.tokenizer import Tokenizer

MAX_EXAMPLES = 10_000  # of an endless source, in which labels are looked for


@dataclass(frozen=True)
class SequenceClassification(Objective):
    """Examples have `text`, `first` and `second`, or `image`, and a `label`: a string, or a number from 0."""

    labels: tuple[str, ...] = ()  # names in the order of their ids; empty: found in the data, or labels are numbers

    def check_model(self, model: Model) -> None:
        require_model(self, model, Encoder)
        assert isinstance(model, Encoder)
        head = model.head
        pooled = isinstance(head, Distilled) or isinstance(head, Classification) and head.pool != "none"
        require(pooled, f"objective {self.kind} needs an encoder with a classification head with a pool, not {head}")

    def fit(self, examples: Examples) -> Self:
        found = {example["label"] for example in read_examples(examples, MAX_EXAMPLES) if "label" in example}
        names = sorted(label for label in found if isinstance(label, str))
        return self if self.labels or not names else replace(self, labels=tuple(names))

    @property
    def head_options(self) -> Mapping[str, Any]:
        return {"labels": len(self.labels), "label_names": list(self.labels)} if self.labels else {}

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "label")
        label = {"label": np.array(self.label_id(example["label"]), np.int64)}
        return label | ({"image": example["image"]} if "image" in example else encode_texts(example, tokenizer))

    def label_id(self, label: Any) -> int:
        if isinstance(label, str):
            if label not in self.labels:
                raise ValueError(
                    f"the label {label!r} is not one of {', '.join(self.labels)}; add it to objective.labels"
                )
            return self.labels.index(label)
        return int(label)

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        labels = torch.from_numpy(np.stack([item["label"] for item in items]))
        return Batch(**collate_inputs(items, tokenizer, length), labels=labels)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return classification(model, batch)


def encode_texts(example: Example, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`ids` of a text, or `ids` and `types` of a pair, with the special tokens of the tokenizer."""
    if "first" in example:
        first, second = text_of(example, "first"), text_of(example, "second")
        ids, types = tokenizer.encode_with_special_tokens(first, second), tokenizer.token_type_ids(first, second)
        return {"ids": np.array(ids, np.int64), "types": np.array(types, np.int64)}
    return {"ids": np.array(tokenizer.encode_with_special_tokens(text_of(example, "text")), np.int64)}


def collate_inputs(items: Sequence[Item], tokenizer: Tokenizer, length: int) -> dict[str, Tensor]:
    """`images`, or `tokens` with `valid` and, for pairs, `types`; sequences are cut after `length` tokens."""
    if "image" in items[0]:
        return {"images": torch.from_numpy(np.stack([item["image"] for item in items])).float()}
    cut = [{name: item[name][:length] for name in ("ids", "types") if name in item} for item in items]
    tokens, valid = pad_items(cut, "ids", tokenizer.pad or 0)
    types = {"types": pad_items(cut, "types")[0]} if "types" in cut[0] else {}
    return {"tokens": tokens, "valid": valid, **types}


def classification(model: nn.Module, batch: Batch) -> LossResult:
    """Needs labels (B,), and tokens or images (also audio or video); or labels and weights (B, L), and tokens."""
    logits, losses = logits_of(model, batch)  # (…, labels)
    labels, weights = batch.labels.flatten(), batch.get("weights", torch.ones_like(batch.labels)).flatten()
    weights = weights.to(logits.dtype)
    loss = (F.cross_entropy(logits.flatten(0, -2), labels, reduction="none") * weights).sum()
    correct = ((logits.detach().flatten(0, -2).argmax(-1) == labels) * weights).sum()
    return add_losses(loss, weights.sum(), losses, {"accuracy": correct})


def relevance(model: nn.Module, batch: Batch) -> LossResult:
    """Needs labels (B,) between 0 and 1, and tokens."""
    logits, losses = logits_of(model, batch)  # (B, 1)
    labels = batch.labels.to(logits.dtype)
    loss = F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels, reduction="sum")
    correct = ((logits.detach().squeeze(-1) > 0) == (labels > 0.5)).sum()
    return add_losses(loss, torch.ones_like(labels).sum(), losses, {"accuracy": correct})


def logits_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
    """Logits of images; or of tokens, with `valid` if rows are padded and `types` if they are pairs of sequences."""
    if "images" in batch:
        outputs = model(batch.images, outputs=True)
    else:
        outputs = model(batch.tokens, padded_layout(batch.get("valid")), batch.get("types"), outputs=True)
    return outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32)), outputs.losses
