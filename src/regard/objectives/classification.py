"""Classify a sequence, a pair of sequences, an image, or every word of a sequence.

    loss = Σ -log softmax(logits)[label]

Each row counts once. If words have labels, the first token of each word counts once, and its other tokens not at all
(Devlin et al. 2018). Labels are strings, whose names are stored in the head of the model, or numbers from 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import Item, pad_items
from regard.data.sources.base import Example, Splits, first_epoch, shown
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Distilled
from regard.objectives.base import (
    Columns,
    LossResult,
    Objective,
    add_losses,
    require_keys,
    require_model,
    takes_tokens,
)
from regard.objectives.inputs import (
    check_first_example,
    collate_inputs,
    encode_input,
    label_options,
    logits_of,
    stack_labels,
    token_columns,
    truncate,
)
from regard.spec import require
from regard.text.tokenizer import Tokenizer

MAX_EXAMPLES = 10_000  # of an endless source, in which labels are looked for
MAX_NUMBER = 1000  # a larger label needs as many examples


@dataclass(frozen=True)
class Labelled(Objective):
    """Objectives with labels from a finite set."""

    labels: tuple[str, ...] = ()  # names in the order of their ids; empty: found in the data, or labels are numbers
    num_labels: int = 0  # if labels are numbers; 0: that of the model's head, or one more than the largest label

    def labels_of(self, example: Example) -> Iterator[Any]:
        raise NotImplementedError

    def check(self) -> None:
        require(self.num_labels >= 0, f"{self.kind}: num_labels={self.num_labels} must not be negative")
        require(
            len(set(self.labels)) == len(self.labels),
            f"{self.kind}: labels={list(self.labels)} has a name twice; the names of labels must differ",
        )

    def fit(self, splits: Splits, model: Model) -> Self:
        """Labels are looked for in all splits, because a rare one may occur only in held-out examples."""
        check_first_example(model, splits.train)
        head = model.head if isinstance(model, Encoder) else None
        names, count = getattr(head, "label_names", ()), getattr(head, "labels", 1)
        if self.labels or self.num_labels:
            return self
        if names or count > 1:
            return replace(self, labels=names, num_labels=0 if names else count)
        name, found, count = splits.train.name, set(), 0
        for example in chain.from_iterable(first_epoch(split, MAX_EXAMPLES) for split in splits if split is not None):
            count += 1
            for label in self.labels_of(example):
                found.add(label if isinstance(label, str) else self.label_id(label, example))
        strings = sorted(label for label in found if isinstance(label, str))
        require(
            not strings or len(strings) == len(found),
            f"{name}: some labels are strings and some are numbers; use one of both",
        )
        require(
            len(found) != 1,
            f"{name}: all labels are {next(iter(found), None)!r}, so there is nothing to learn; add examples with "
            "other labels, or name all labels in objective.labels",
        )
        if strings:
            return replace(self, labels=tuple(strings))
        largest = max(found, default=0)
        require(
            largest < max(MAX_NUMBER, count),
            f"{name}: the largest label is {largest}, and the head would have one output for each number up to it; "
            "number the labels from 0 without gaps, or set objective.num_labels",
        )
        return replace(self, num_labels=largest + 1)

    @property
    def head_options(self) -> Mapping[str, Any]:
        return label_options(self.labels, self.num_labels)

    def check_labels(self, head: Classification | Distilled) -> None:
        """Raise SpecError if the labels of the data are not those of the head."""
        count = len(self.labels) or self.num_labels
        require(
            count <= head.labels,
            f"the data have {count} labels, and the model's head only {head.labels}; leave out model.head.labels",
        )
        require(
            not self.labels or not head.label_names or self.labels == head.label_names,
            f"objective.labels are {', '.join(self.labels)}, those of the model's head are "
            f"{', '.join(head.label_names)}; leave one out",
        )

    def label_id(self, label: Any, example: Example) -> int:
        if isinstance(label, str):
            if label not in self.labels:
                known = ", ".join(self.labels) or "numbers"
                raise ValueError(
                    f"the label {label!r} is not one of {known}; correct it or set objective.labels; "
                    f"the example is {shown(example)}"
                )
            return self.labels.index(label)
        count = len(self.labels) or self.num_labels
        if isinstance(label, bool | np.bool_) or not isinstance(label, int | np.integer):
            raise ValueError(
                f"the label {label!r:.40} is neither a string nor a whole number; the example is {shown(example)}"
            )
        if label < 0 or count and label >= count:
            upper = f" to {count - 1}" if count else ""
            raise ValueError(
                f"the label {label} is not a number from 0{upper}; correct it or set objective.num_labels; "
                f"the example is {shown(example)}"
            )
        return int(label)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return classification(model, batch)


@dataclass(frozen=True)
class SequenceClassification(Labelled):
    """Examples have `text`, `first` and `second`, or `image`, and a `label`."""

    def check_model(self, model: Model) -> None:
        head = model.head if isinstance(model, Encoder) else None
        fits = isinstance(head, Distilled) or isinstance(head, Classification) and head.pool != "none"
        require_model(self, model, fits, "an encoder with a classification head that pools")
        assert isinstance(head, Classification | Distilled)
        self.check_labels(head)

    def labels_of(self, example: Example) -> Iterator[Any]:
        yield from (example[key] for key in ("label",) if key in example)

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "label")
        label = np.array(self.label_id(example["label"], example), np.int64)
        return encode_input(example, tokenizer) | {"label": label}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        return [truncate(columns, length)]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        return Batch(**collate_inputs(items, tokenizer), labels=stack_labels(items))


@dataclass(frozen=True)
class TokenClassification(Labelled):
    """Examples have `tokens` (the words of a text), and `labels`, one per word."""

    def check_model(self, model: Model) -> None:
        head = model.head if isinstance(model, Encoder) else None
        fits = takes_tokens(model) and isinstance(head, Classification) and head.pool == "none"
        require_model(self, model, fits, 'an encoder of tokens with a classification head that has pool="none"')
        assert isinstance(head, Classification)
        self.check_labels(head)

    def labels_of(self, example: Example) -> Iterator[Any]:
        labels = example.get("labels")
        yield from labels if isinstance(labels, list | tuple) else ()

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "tokens", "labels")
        words, labels = example["tokens"], example["labels"]
        if not isinstance(labels, list | tuple) or not isinstance(words, list | tuple) or not all_strings(words):
            raise ValueError(
                f"`tokens` must be a list of strings, and `labels` a list; the example is {shown(example)}"
            )
        labels = [self.label_id(label, example) for label in labels]
        if len(words) != len(labels) or not words:
            raise ValueError(
                f"{len(words)} tokens have {len(labels)} labels; give one per token; the example is {shown(example)}"
            )
        encoded = tokenizer.encode_words(words)
        indices = np.array(encoded.words, np.int64)
        first = (indices >= 0) & (np.diff(indices, prepend=-1) != 0)  # the first token of each word
        return token_columns(encoded) | {
            "labels": np.where(first, np.array(labels, np.int64)[indices], 0),
            "weights": first.astype(np.float32),
        }

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        return [truncate(columns, length)]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        labels, weights = (pad_items(items, name)[0] for name in ("labels", "weights"))
        return Batch(**collate_inputs(items, tokenizer), labels=labels, weights=weights)


def all_strings(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def classification(model: nn.Module, batch: Batch) -> LossResult:
    """Needs labels (B,), and tokens or images (also audio or video); or labels and weights (B, L), and tokens."""
    logits, losses = logits_of(model, batch)  # (…, labels)
    labels, weights = batch.labels.flatten(), batch.get("weights", torch.ones_like(batch.labels)).flatten()
    weights = weights.to(logits.dtype)
    loss = (F.cross_entropy(logits.flatten(0, -2), labels, reduction="none") * weights).sum()
    correct = ((logits.detach().flatten(0, -2).argmax(-1) == labels) * weights).sum()
    return add_losses(loss, weights.sum(), losses, {"accuracy": correct})
