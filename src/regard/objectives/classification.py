"""Say what a text, an image or every token of a text is; or how well a pair belongs together.

    classification   loss = Σ -log softmax(logits)[label]
    relevance        loss = Σ -y log σ(s) - (1 - y) log(1 - σ(s))        one score a pair, y in [0, 1]

A row counts once, and in tagging a token by its weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.layout import TokenLayout
from regard.objectives.next_token import LossResult, counted
from regard.parts.block import Losses


def classification(model: nn.Module, batch: Batch) -> LossResult:
    """Needs labels (B,), and images (sounds, films) or tokens; or labels and weights (B, L), and tokens."""
    logits, losses = read(model, batch)  # (…, labels)
    labels, weights = batch.labels.flatten(), batch.get("weights", torch.ones_like(batch.labels)).flatten()
    weights = weights.to(logits.dtype)
    loss = (F.cross_entropy(logits.flatten(0, -2), labels, reduction="none") * weights).sum()
    correct = ((logits.detach().flatten(0, -2).argmax(-1) == labels) * weights).sum()
    return counted(loss, weights.sum(), losses, {"accuracy": correct})


def relevance(model: nn.Module, batch: Batch) -> LossResult:
    """Needs labels (B,) between 0 and 1, and tokens."""
    logits, losses = read(model, batch)  # (B, 1)
    labels = batch.labels.to(logits.dtype)
    loss = F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels, reduction="sum")
    correct = ((logits.detach().squeeze(-1) > 0) == (labels > 0.5)).sum()
    return counted(loss, torch.ones_like(labels).sum(), losses, {"accuracy": correct})


def read(model: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
    """What the model says of images; or of tokens, with `valid` where rows are padded, `types` where they are pairs."""
    if "images" in batch:
        out = model(batch.images, outputs=True)
    else:
        out = model(batch.tokens, padded(batch.get("valid")), batch.get("types"), outputs=True)
    return out.logits.to(torch.promote_types(out.logits.dtype, torch.float32)), out.losses


def padded(valid: Tensor | None) -> TokenLayout | None:
    """Rows of one text each, padded on either side."""
    return None if valid is None else TokenLayout((valid.cumsum(-1) - 1).clamp_min(0), valid=valid, consecutive=True)
