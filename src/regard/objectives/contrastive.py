"""Bring pairs together and keep all other combinations of a batch apart.

    softmax   loss = ½ Σ_i -log softmax_j(s_ij)[i] + ½ Σ_j -log softmax_i(s_ij)[j]       Radford et al. 2021 (CLIP)
    sigmoid   loss = Σ_ij -log σ(± s_ij)          + where i = j, - elsewhere             Zhai et al. 2023 (SigLIP)

Every row is an example against all others, so the loss is that of a whole batch and cannot be cut into parts.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.objectives.classification import padded
from regard.objectives.next_token import LossResult, counted


@dataclass(frozen=True)
class Contrastive:
    scope: ClassVar[str] = "batch"

    loss: Literal["softmax", "sigmoid"] = "softmax"

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs images and tokens, row by row a pair; `valid` where texts are padded."""
        out = model(batch.images, batch.tokens, padded(batch.get("valid")), outputs=True)
        logits = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))  # (B, B)
        pairs = torch.arange(len(logits), device=logits.device)
        found = (logits.detach().argmax(-1) == pairs).sum()
        count = torch.ones_like(logits[0]).sum()
        return counted(LOSSES[self.loss](logits, pairs), count, out.losses, {"accuracy": found})


def softmax(logits: Tensor, pairs: Tensor) -> Tensor:
    by_row, by_column = (F.cross_entropy(one, pairs, reduction="sum") for one in (logits, logits.T))
    return (by_row + by_column) / 2


def sigmoid(logits: Tensor, pairs: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(pairs), dtype=logits.dtype, device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum()


LOSSES = {"softmax": softmax, "sigmoid": sigmoid}
