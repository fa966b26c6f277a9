"""Sequence to sequence: predict a target from a source.

    loss = Σ_t w_t · -log p(target_t | earlier targets, source)                              Sutskever et al. 2014

Teacher forcing: the input of the decoder is the true target, shifted right by one after a start token, so one forward
predicts every token. Label smoothing ε replaces the one-hot target by (1 - ε) onehot + ε / V (Vaswani et al. 2017).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item, pad_items
from regard.data.sources.base import Example
from regard.models.base import Model
from regard.models.encoder_decoder import EncoderDecoder
from regard.objectives.base import (
    Columns,
    LossResult,
    Objective,
    layout_of,
    padded_layout,
    require_keys,
    require_model,
    token_loss,
)
from regard.objectives.text import end_id, start_id, text_of
from regard.spec import require
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SequenceToSequence(Objective):
    """The base of objectives whose items have a `source`, and `tokens` and `targets` of the decoder."""

    label_smoothing: float = 0.0

    def check(self) -> None:
        require(
            0 <= self.label_smoothing < 1,
            f"{self.kind}: label_smoothing={self.label_smoothing} must be at least 0 and less than 1",
        )

    def check_model(self, model: Model) -> None:
        require_model(self, model, EncoderDecoder)

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> None:
        tokenizer.decoder_start = start_id(tokenizer)

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        source, source_valid = pad_items(items, "source", tokenizer.pad or 0)
        tokens, valid = pad_items(items, "tokens", tokenizer.pad or 0)
        return sequence_batch(source, source_valid, tokens, pad_items(items, "targets")[0], valid)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return translation(model, batch, self.label_smoothing)


@dataclass(frozen=True)
class Translation(SequenceToSequence):
    """Examples have `source` and `target`."""

    label_smoothing: float = 0.1
    too_long: Literal["refuse", "drop", "cut"] = "refuse"  # for an example with more tokens than data.length

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "source", "target")
        source = tokenizer.encode_with_special_tokens(text_of(example, "source"))
        if not source:
            raise ValueError(f"objective {self.kind}: the source of this example has no tokens: {example!r:.200}")
        target = tokenizer.encode(text_of(example, "target"))
        return {"source": np.array(source, np.int64), "target": np.array([*target, end_id(tokenizer)], np.int64)}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        for name in ("source", "target"):
            tokens = len(columns[name])
            if tokens > length and self.too_long == "refuse":
                raise ValueError(
                    f"the {name} of this example has {tokens} tokens, more than data.length={length}, and its end "
                    f"would be lost: {tokenizer.decode(columns[name].tolist())!r:.120}; raise data.length, or set "
                    "objective.too_long to drop or cut"
                )
            if tokens > length and self.too_long == "drop":
                return []
        return [sequence_item(columns["source"][:length], columns["target"][:length], tokenizer)]


def sequence_item(source: np.ndarray, target: np.ndarray, tokenizer: Tokenizer) -> Item:
    """The input of the decoder is the target, shifted right by one after the start token."""
    return {"source": source, "tokens": np.concatenate([[start_id(tokenizer)], target[:-1]]), "targets": target}


def sequence_batch(source: Tensor, source_valid: Tensor, tokens: Tensor, targets: Tensor, valid: Tensor) -> Batch:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Batch(
        source=source,
        source_valid=source_valid,
        tokens=tokens,
        targets=targets,
        weights=valid.float(),
        positions=positions.where(valid, 0),
        segments=valid.long() - 1,
    )


def translation(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> LossResult:
    """Needs source and source_valid (B, S), and the fields of next_token."""
    layout, source_layout = layout_of(batch), padded_layout(batch.get("source_valid"))
    outputs = model(batch.source, batch.tokens, source_layout, layout, outputs=True)
    return token_loss(outputs, batch, label_smoothing)


def translation_batch(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], start: int, end: int
) -> Batch:
    """A padded batch of sources and targets: the input starts with token `start`, the target ends with `end`."""
    items = [
        {"source": np.array(source), "tokens": np.array([start, *target]), "targets": np.array([*target, end])}
        for source, target in zip(sources, targets, strict=True)
    ]
    (tokens, valid), (padded_targets, _) = pad_items(items, "tokens"), pad_items(items, "targets")
    return sequence_batch(*pad_items(items, "source"), tokens, padded_targets, valid)
