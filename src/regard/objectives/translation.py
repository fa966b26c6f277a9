"""Sequence to sequence: predict a target from a source, which is a text, an image or a signal.

    loss = Σ_t w_t · -log p(target_t | earlier targets, source)                              Sutskever et al. 2014

Teacher forcing: the input of the decoder is the true target, shifted right by one after a start token, so one forward
predicts every token. Label smoothing ε replaces the one-hot target by (1 - ε) onehot + ε / V (Vaswani et al. 2017).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item, pad_items
from regard.data.sources.base import Example, Splits, shown
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
    takes_tokens,
    token_loss,
)
from regard.objectives.inputs import check_first_example, encode_input, stack_images
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
        fits = isinstance(model, EncoderDecoder) and takes_tokens(model.source)
        require_model(self, model, fits, "an encoder_decoder or seq2seq with a source of tokens")

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> None:
        tokenizer.decoder_start = start_id(tokenizer)

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        has_images = "image" in items[0]
        source = (stack_images(items), None) if has_images else pad_items(items, "source", tokenizer.pad or 0)
        tokens, valid = pad_items(items, "tokens", tokenizer.pad or 0)
        return sequence_batch(*source, tokens, pad_items(items, "targets")[0], valid)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return translation(model, batch, self.label_smoothing)


@dataclass(frozen=True)
class Translation(SequenceToSequence):
    """Examples have `source`, `image` or `signal`, and `target`."""

    label_smoothing: float = 0.1
    too_long: Literal["refuse", "drop", "cut"] = "refuse"  # for an example with more tokens than data.length

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, EncoderDecoder), "an encoder_decoder or seq2seq")

    def fit(self, splits: Splits, model: Model) -> Self:
        assert isinstance(model, EncoderDecoder), "checked in check_model"
        check_first_example(model.source, splits.train)
        return self

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        """`target`, and `source` or `image`."""
        require_keys(self, example, "target")
        target = [*tokenizer.encode(text_of(example, "target")), end_id(tokenizer)]
        columns = {"target": np.array(target, np.int64)}
        if "image" in example or "signal" in example:
            return columns | encode_input(example, tokenizer)
        require_keys(self, example, "source", "target")
        source = tokenizer.encode_with_special_tokens(text_of(example, "source"))
        if not source:
            raise ValueError(f"objective {self.kind}: the source of this example has no tokens: {shown(example)}")
        return columns | {"source": np.array(source, np.int64)}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        for name in ("source", "target"):
            tokens = len(columns.get(name, ()))
            if tokens > length and self.too_long == "refuse":
                raise ValueError(
                    f"the {name} of this example has {tokens} tokens, more than data.length={length}, and its end "
                    f"would be lost: {tokenizer.decode(columns[name].tolist())!r:.120}; raise data.length, or set "
                    "objective.too_long to drop or cut"
                )
            if tokens > length and self.too_long == "drop":
                return []
        target = columns["target"][:length]
        if "image" in columns:
            return [{"image": columns["image"], **target_item(target, tokenizer)}]
        return [sequence_item(columns["source"][:length], target, tokenizer)]


def sequence_item(source: np.ndarray, target: np.ndarray, tokenizer: Tokenizer) -> Item:
    return {"source": source, **target_item(target, tokenizer)}


def target_item(target: np.ndarray, tokenizer: Tokenizer) -> Item:
    """The input of the decoder is the target, shifted right by one after the start token."""
    return {"tokens": np.concatenate([[start_id(tokenizer)], target[:-1]]), "targets": target}


def sequence_batch(
    source: Tensor, source_valid: Tensor | None, tokens: Tensor, targets: Tensor, valid: Tensor
) -> Batch:
    """source_valid: False for padding of a source of tokens."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Batch(
        source=source,
        **({} if source_valid is None else {"source_valid": source_valid}),
        tokens=tokens,
        targets=targets,
        weights=valid.float(),
        positions=positions.where(valid, 0),
        segments=valid.long() - 1,
    )


def translation(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> LossResult:
    """Needs source (B, S) and source_valid (B, S), or a source of images; and the fields of next_token."""
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
