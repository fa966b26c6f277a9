"""Sentence embeddings: an anchor is more similar to its positive than to all other sentences of the batch.

    s_ij = scale · cos(anchor_i, candidate_j)        loss = Σ_i -log softmax_j(s_ij)[i]

The candidates are the positives of all rows, then the negatives of all rows. The symmetric form adds the loss of the
anchors as candidates of the positives, and halves the sum. Henderson et al. 2017; hard negatives Karpukhin et al. 2020.
Every row is compared with all others, so a batch cannot be split for gradient accumulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import Item, pad_items
from regard.data.sources.base import Example, Splits
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import Pooled
from regard.objectives.base import (
    Columns,
    LossResult,
    Objective,
    add_losses,
    padded_layout,
    require_keys,
    require_model,
    takes_tokens,
)
from regard.objectives.inputs import encode_input, truncate, wide_logits
from regard.spec import require
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SentenceEmbeddings(Objective):
    """Examples have `anchor`, `positive` and optionally `negative`, or `negatives` (a list)."""

    scope: ClassVar[Literal["token", "batch"]] = "batch"

    scale: float = 20.0  # of the cosine: the inverse of the temperature
    symmetric: bool = False

    def check(self) -> None:
        require(self.scale > 0, f"{self.kind}: scale={self.scale} must be positive")

    def check_model(self, model: Model) -> None:
        fits = isinstance(model, Encoder) and takes_tokens(model) and isinstance(model.head, Pooled)
        require_model(self, model, fits, "an encoder of tokens with a pooled head")

    def fit(self, splits: Splits, model: Model) -> Self:
        require_keys(self, splits.train.example(0), "anchor", "positive")
        return self

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        """`ids_0` of the anchor, `ids_1` of the positive, `ids_2` … of the negatives, with their `sequences`."""
        require_keys(self, example, "anchor", "positive")
        texts = [example["anchor"], example["positive"], *negatives_of(example)]
        encoded = [encode_input({"text": text}, tokenizer) for text in texts]
        return {f"{name}_{n}": array for n, columns in enumerate(encoded) for name, array in columns.items()}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        """`ids_0`, `ids_1` …"""
        sentences = [
            truncate({"ids": columns[f"ids_{n}"], "sequences": columns[f"sequences_{n}"]}, length)
            for n in range(len(columns) // 2)
        ]
        return [{f"ids_{n}": sentence["ids"] for n, sentence in enumerate(sentences)}]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        """tokens and valid (B, n, L): the anchor, the positive and the negatives of each row, n - 2 at most."""
        items = [item for row in rows for item in row]
        count, empty = max(map(len, items)), np.zeros(0, np.int64)
        sentences = [{"ids": item.get(f"ids_{n}", empty)} for item in items for n in range(count)]
        tokens, valid = pad_items(sentences, "ids", tokenizer.pad or 0)
        shape = (len(items), count)
        return Batch(tokens=tokens.unflatten(0, shape), valid=valid.unflatten(0, shape))

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs tokens and valid (B, n, L); a negative without valid tokens is missing."""
        anchors, candidates, losses = self.embed(model, batch)  # (B, dim), (B + negatives, dim)
        scores = self.scale * anchors @ candidates.T
        targets = torch.arange(len(anchors), device=scores.device)
        loss = F.cross_entropy(scores, targets, reduction="sum")
        if self.symmetric:
            loss = (loss + F.cross_entropy(scores[:, : len(anchors)].T, targets, reduction="sum")) / 2
        found = (scores.detach().argmax(-1) == targets).sum()
        return add_losses(loss, torch.ones_like(anchors[:, 0]).sum(), losses, {"recall@1": found})

    def embed(self, model: nn.Module, batch: Batch):
        """The normalized embeddings of the anchors, and of all positives and then all negatives."""
        order = batch.tokens.transpose(0, 1).flatten(0, 1)  # (n·B, L): all anchors, all positives, …
        valid = batch.valid.transpose(0, 1).flatten(0, 1)
        present = valid.any(-1)
        present[: 2 * batch.size] = True
        outputs = model(order[present], padded_layout(valid[present]), outputs=True)
        embeddings = F.normalize(wide_logits(outputs.logits), dim=-1)
        return embeddings[: batch.size], embeddings[batch.size :], outputs.losses


def negatives_of(example: Example) -> Sequence[str]:
    single, several = example.get("negative"), example.get("negatives")
    if several is not None and not isinstance(several, list | tuple):
        raise ValueError(f"`negatives` of an example must be a list of strings, found {several!r:.60}")
    return [*([] if single is None else [single]), *(several or ())]
