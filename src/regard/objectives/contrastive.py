"""Contrastive learning: matching pairs score higher than all other combinations in the batch.

    softmax   loss = ½ Σ_i -log softmax_j(s_ij)[i] + ½ Σ_j -log softmax_i(s_ij)[j]       Radford et al. 2021 (CLIP)
    sigmoid   loss = Σ_ij -log σ(± s_ij)          + where i = j, - elsewhere             Zhai et al. 2023 (SigLIP)

Every row is compared with all others, so a batch cannot be split for gradient accumulation.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.objectives.base import LossResult, add_losses, padded_layout


@dataclass(frozen=True)
class Contrastive:
    scope: ClassVar[str] = "batch"  # the loss compares all rows: no micro-batches

    loss: Literal["softmax", "sigmoid"] = "softmax"

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs images and tokens, one pair per row; `valid` if sequences are padded."""
        outputs = model(batch.images, batch.tokens, padded_layout(batch.get("valid")), outputs=True)
        logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))  # (B, B)
        targets = torch.arange(len(logits), device=logits.device)
        correct = (logits.detach().argmax(-1) == targets).sum()
        count = torch.ones_like(logits[0]).sum()
        return add_losses(LOSSES[self.loss](logits, targets), count, outputs.losses, {"accuracy": correct})


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    by_row, by_column = (F.cross_entropy(scores, targets, reduction="sum") for scores in (logits, logits.T))
    return (by_row + by_column) / 2


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(targets), dtype=logits.dtype, device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum()


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}
