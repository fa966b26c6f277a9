"""Predict one number: the value of a sequence, pair or image, or how well the sequences of a pair match.

    regression   loss = Σ (s - y)²
    relevance    loss = Σ -y log σ(s) - (1 - y) log(1 - σ(s))        y in [0, 1]; Nogueira & Cho 2019 (cross-encoder)

The head is a classification head with one label, whose logit is the score s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item
from regard.data.sources.base import Example, Splits, shown
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import Classification
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
    logits_of,
    stack_labels,
    truncate,
)
from regard.spec import require
from regard.text.tokenizer import Tokenizer
from regard.text.train import CLS, SEP


@dataclass(frozen=True)
class Regression(Objective):
    """Examples have `text`, `first` and `second`, or `image`, and a `label`: a number, in CSV a string of one."""

    pairs: ClassVar[bool] = False  # whether all examples are pairs of sequences

    def check_model(self, model: Model) -> None:
        head = model.head if isinstance(model, Encoder) and (takes_tokens(model) or not self.pairs) else None
        fits = isinstance(head, Classification) and head.pool != "none"
        input = " of tokens" if self.pairs else ""
        require_model(self, model, fits, f"an encoder{input} with a classification head that pools")
        assert isinstance(head, Classification)
        require(
            head.labels == 1,
            f"objective {self.kind} predicts one number, and the head of this model has labels={head.labels}; set "
            "model.head.labels=1, or leave it out",
        )

    def fit(self, splits: Splits, model: Model) -> Self:
        check_first_example(model, splits.train)
        return self

    @property
    def head_options(self) -> Mapping[str, Any]:
        return {"labels": 1}

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "label")
        return encode_input(example, tokenizer) | {"label": np.array(self.number(example), np.float32)}

    def number(self, example: Example) -> float:
        label = example["label"]
        try:
            number = float(label)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"the label {label!r:.40} is not a finite number; the example is {shown(example)}")
        return number

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        return [truncate(columns, length)]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        return Batch(**collate_inputs(items, tokenizer), labels=stack_labels(items))

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return regression(model, batch)


@dataclass(frozen=True)
class Relevance(Regression):
    """Examples have `first`, `second` and a `label` in [0, 1]; with a `group` the mean reciprocal rank is measured.

    Pairs with the same group (a number) have the same query and should be next to each other in the data.
    """

    pairs: ClassVar[bool] = True
    special_tokens = (CLS, SEP)

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "first", "second", "label")
        group = {"group": np.array(group_of(example), np.int64)} if "group" in example else {}
        return {**super().tokenize(example, tokenizer), **group}

    def number(self, example: Example) -> float:
        label = super().number(example)
        if not 0 <= label <= 1:
            raise ValueError(f"the label {label} is not in [0, 1]; the example is {shown(example)}")
        return label

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        groups = {"groups": stack_labels(items, "group")} if all("group" in item for item in items) else {}
        return Batch(**super().collate(rows, tokenizer, length), **groups)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return relevance(model, batch)


def group_of(example: Example) -> int:
    try:
        return int(example["group"])
    except (TypeError, ValueError):
        raise ValueError(
            f"the group {example['group']!r:.40} is not a whole number; number the queries; the example is "
            f"{shown(example)}"
        ) from None


def regression(model: nn.Module, batch: Batch) -> LossResult:
    """Needs labels (B,), and tokens or images."""
    scores, losses = logits_of(model, batch)  # (B, 1)
    scores, labels = scores.squeeze(-1), batch.labels.to(scores.dtype)
    error = (scores.detach() - labels).abs().sum()
    loss = F.mse_loss(scores, labels, reduction="sum")
    return add_losses(loss, torch.ones_like(labels).sum(), losses, {"absolute_error": error})


def relevance(model: nn.Module, batch: Batch) -> LossResult:
    """Needs labels (B,) between 0 and 1, and tokens; `groups` (B,) for the mean reciprocal rank."""
    scores, losses = logits_of(model, batch)  # (B, 1)
    scores, labels = scores.squeeze(-1), batch.labels.to(scores.dtype)
    loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
    metrics = {"accuracy": ((scores.detach() > 0) == (labels > 0.5)).sum()}
    if "groups" in batch:
        metrics["reciprocal_rank"] = reciprocal_ranks(scores.detach(), labels > 0.5, batch.groups).sum()
    return add_losses(loss, torch.ones_like(labels).sum(), losses, metrics)


def reciprocal_ranks(scores: Tensor, relevant: Tensor, groups: Tensor) -> Tensor:
    """For each row, 1 / rank of the best relevant row of its group; 0 if the group has none. All arguments (B,)."""
    same = groups[:, None] == groups  # (B, B)
    best = scores.where(same & relevant, -torch.inf).amax(-1, keepdim=True)  # (B, 1)
    ranks = 1 + (same & ~relevant & (scores >= best)).sum(-1)  # ties count as errors
    return torch.where((same & relevant).any(-1), 1 / ranks, 0.0)
