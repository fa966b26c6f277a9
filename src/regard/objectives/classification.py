"""Classify a sequence, an image or every token of a sequence; or score how well a pair of sequences matches.

    classification   loss = Σ -log softmax(logits)[label]
    relevance        loss = Σ -y log σ(s) - (1 - y) log(1 - σ(s))        one score per pair, y in [0, 1]

Each row counts once; if every token has a label, each token counts by its weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.objectives.base import LossResult, add_losses, padded_layout
from regard.parts.block import Losses


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
