"""Next-token prediction: the objective of autoregressive models, from pretraining to supervised fine-tuning.

    loss = Σ_t w_t · -log p(token_{t+1} | tokens up to t)

An example is a `text`, of which every token counts; a `prompt` with its `completion`, or `messages`, of which only the
completion and the assistant's messages count, with their end tokens. A document of n tokens has n - 1 pairs (token,
next token); one with more pairs than a row is sliced, and each slice is treated like a document: its positions start at
0, and it does not attend to the previous slice. With `slices="random"` every visit of a document trains on one slice
from a random position, so that the rows of a batch come from different documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import Item, pack
from regard.data.sources.base import Example, shown
from regard.data.spans import tokenize_spans
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.objectives.base import Columns, LossResult, Objective, layout_of, require_model, token_loss
from regard.objectives.chat import tokenize_chat, tokenize_completion
from regard.objectives.text import end_id, text_of
from regard.spec import require
from regard.text.messages import tools_of
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class NextToken(Objective):
    packed = True

    train_on: Literal["answers", "all"] = "answers"  # of prompts and conversations: the tokens that count
    slices: Literal["all", "random"] = "all"  # of a document longer than a row; random: one per epoch, from anywhere
    z_loss: float = 0.0  # coefficient of (log Σ exp logits)², which keeps logits small; 1e-4 in PaLM

    def check(self) -> None:
        require(self.z_loss >= 0, f"{self.kind}: z_loss={self.z_loss} must not be negative")

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, Decoder), "a decoder")

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        columns = tokenize_document(example, tokenizer)
        if self.train_on == "all":
            return {"ids": columns["ids"]}
        if "weights" in columns and not columns["weights"].any():
            raise ValueError(f"this example has no token to train on: {shown(example)}; add an answer of the assistant")
        return columns

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        pairs = len(columns["ids"]) - 1
        starts = range(0, pairs, length)
        if self.slices == "random" and pairs > length:
            starts = [int(rng.integers(pairs - length + 1))]
        slices = (slice_columns(columns, start, length) for start in starts)
        return [item for item in slices if item["weights"].any()]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        return pack(rows, length, tokenizer.pad or 0)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return next_token(model, batch, self.z_loss)


def tokenize_document(example: Example, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`ids`, and `weights` unless all of them are 1."""
    if "spans" in example:
        return tokenize_spans(example["spans"], tokenizer)
    if "messages" in example:
        return tokenize_chat(example["messages"], tokenizer, tools_of(example))
    if "completion" in example:
        return tokenize_completion(example.get("prompt"), example["completion"], tokenizer, tools_of(example))
    if "text" not in example:
        raise ValueError(
            f"an example needs `text`, `messages`, or `prompt` and `completion`; this one has {', '.join(example)}; "
            'rename a field, for example by data.columns=["text=content"]'
        )
    end = [end_id(tokenizer)] if example.get("end", True) else []
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(text_of(example, "text")), *end]
    return {"ids": np.array(ids, np.int64)}


def slice_columns(columns: Columns, start: int, length: int) -> Item:
    """`length` pairs (token, next token) from `start` on; the last target is the first token of the next slice."""
    ids = columns["ids"][start : start + length + 1]
    weights = columns["weights"][start + 1 : start + length + 1] if "weights" in columns else np.ones(len(ids) - 1)
    return {"tokens": ids[:-1], "targets": ids[1:], "weights": weights}


def next_token(model: nn.Module, batch: Batch, z_loss: float = 0.0) -> LossResult:
    """Needs tokens, targets, weights, positions and segments, all (B, L)."""
    # prompts and padding need no logits; on a GPU their number would have to be waited for
    sparse = not batch.weights.is_cuda and bool((batch.weights == 0).any())
    return token_loss(model(batch.tokens, layout_of(batch), outputs=True), batch, z_loss=z_loss, sparse=sparse)
