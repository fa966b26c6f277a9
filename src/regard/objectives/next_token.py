"""Predict the next token: the objective of every left-to-right language model.

    loss = Σ_t w_t · -log p(target_t | tokens up to t)  /  Σ_t w_t

The two sums are handed back apart and divided once, over the whole step: how a batch is cut for accumulation, how
documents are packed into rows and how rows are shared by ranks cannot change the loss. Metrics are sums of the same
kind, to be divided by the same count. A weight says how often a token counts; padding weighs nothing.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.at import At
from regard.data.batch import Batch

Objective = Callable[[nn.Module, Batch], tuple[Tensor, Tensor, Mapping[str, Tensor]]]


def next_token(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Needs tokens, targets, weights, positions and segments, all (B, L)."""
    logits = model(batch.tokens, where(batch)).flatten(0, 1)  # (B·L, V)
    logits = logits.to(
        torch.promote_types(logits.dtype, torch.float32)
    )  # half precision loses the tail of a sum over V
    targets, weights = batch.targets.flatten(), batch.weights.flatten().to(logits.dtype)  # (B·L,)
    # Products and sums instead of a dot product, which autocast would do in half precision.
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
    correct = ((logits.detach().argmax(-1) == targets) * weights).sum()
    return loss, weights.sum(), {"accuracy": correct}


def where(batch: Batch) -> At:
    """Where a batch's tokens stand. Rows that are one unpadded document each take attention's causal fast path."""
    length = batch.tokens.shape[1]
    if (batch.positions[:, -1] == length - 1).all():  # positions restart with every document, so each row is one
        return At.whole(*batch.tokens.shape, batch.tokens.device)
    return At(batch.positions, batch.segments, valid=batch.segments >= 0)
