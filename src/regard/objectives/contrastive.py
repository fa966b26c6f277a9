"""Contrastive learning: matching pairs score higher than all other combinations in the batch.

    softmax   loss = ½ Σ_i -log softmax_j(s_ij)[i] + ½ Σ_j -log softmax_i(s_ij)[j]       Radford et al. 2021 (CLIP)
    sigmoid   loss = Σ_ij -log σ(± s_ij)          + where i = j, - elsewhere             Zhai et al. 2023 (SigLIP)

Every row is compared with all others, so a batch cannot be split for gradient accumulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item
from regard.data.sources.base import Example, Splits
from regard.models.base import Model
from regard.models.dual_encoder import DualEncoder
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
from regard.objectives.inputs import check_first_example, collate_inputs, encode_input, truncate, wide_logits
from regard.parts.patches import Patches
from regard.text.tokenizer import Tokenizer
from regard.text.train import CLS, SEP


@dataclass(frozen=True)
class Contrastive(Objective):
    """Examples have an `image` and its `text`."""

    scope: ClassVar[Literal["token", "batch"]] = "batch"

    loss: Literal["softmax", "sigmoid"] = "softmax"

    special_tokens = (CLS, SEP)

    def check_model(self, model: Model) -> None:
        fits = isinstance(model, DualEncoder) and isinstance(model.image.input, Patches) and takes_tokens(model.text)
        require_model(self, model, fits, "a dual_encoder of patches and tokens")

    def fit(self, splits: Splits, model: Model) -> Self:
        assert isinstance(model, DualEncoder), "checked in check_model"
        check_first_example(model.image, splits.train)
        return self

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "image", "text")
        image, text = encode_input({"image": example["image"]}, tokenizer), {"text": example["text"]}
        return image | encode_input(text, tokenizer)

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        return [truncate(columns, length)]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        texts = [{"ids": item["ids"]} for item in items]
        return Batch(**collate_inputs(items, tokenizer), **collate_inputs(texts, tokenizer))

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs images and tokens, one pair per row; `valid` if sequences are padded."""
        outputs = model(batch.images, batch.tokens, padded_layout(batch.get("valid")), outputs=True)
        logits = wide_logits(outputs.logits)  # (B, B)
        targets = torch.arange(len(logits), device=logits.device)
        metrics = {
            "accuracy": (logits.detach().argmax(-1) == targets).sum(),  # of the text for an image
            "recall@1": ((logits.detach().argmax(0) == targets).sum()),  # of the image for a text
        }
        count = torch.ones_like(logits[0]).sum()
        return add_losses(LOSSES[self.loss](logits, targets), count, outputs.losses, metrics)


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    by_row, by_column = (F.cross_entropy(scores, targets, reduction="sum") for scores in (logits, logits.T))
    return (by_row + by_column) / 2


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(targets), dtype=logits.dtype, device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum()


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}
