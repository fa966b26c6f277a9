"""Predict the next token: the objective of every left-to-right language model.

    loss = Σ_t w_t · -log p(target_t | tokens up to t)  /  Σ_t w_t

The two sums are handed back apart and divided once, over the whole step: how a batch is cut for accumulation, how
documents are packed into rows and how rows are shared by ranks cannot change the loss. Metrics are sums of the same
kind, to be divided by the same count. A weight says how often a token counts; padding weighs nothing.

What bodies add (the balance of experts) is no sum over tokens: its scope is one part of the batch, and a step has the
mean of its parts by their counts. Heads that look further ahead add their own losses, each for its own targets.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.layout import TokenLayout
from regard.models.outputs import LazyLogits, Outputs
from regard.parts.block import Losses

Objective = Callable[[nn.Module, Batch], tuple[Tensor, Tensor, Mapping[str, Tensor]]]
LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]


def next_token(model: nn.Module, batch: Batch) -> LossResult:
    """Needs tokens, targets, weights, positions and segments, all (B, L)."""
    return token_loss(model(batch.tokens, layout_of(batch), outputs=True), batch)


def token_loss(out: Outputs, batch: Batch) -> LossResult:
    """The losses of what a model has put out for every token, against targets and weights."""
    weights = batch.weights.to(torch.promote_types(out.logits.dtype, torch.float32))
    count = weights.sum()
    loss, correct = cross_entropy(out.logits, batch.targets, weights)
    metrics = {"accuracy": correct}
    for i, logits in enumerate(out.ahead_logits, start=1):
        ahead, _ = cross_entropy(logits, *shifted(batch, weights, i))
        metrics[f"ahead_{i}"] = ahead.detach()
        loss = loss + ahead
    return counted(loss, count, out.losses, metrics)


def counted(loss: Tensor, count: Tensor, losses: Losses, metrics: dict[str, Tensor]) -> LossResult:
    """With what bodies add: each a mean over this part of the batch, so it weighs as much as any of what is counted."""
    extras = {name: extra * count for name, extra in losses.items()}
    return loss + sum(extras.values()), count, metrics | {name: extra.detach() for name, extra in extras.items()}


def cross_entropy(logits: Tensor | LazyLogits, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w · -log p(target), and Σ w where the target is the likeliest, of what is logits in all places (B, L)."""
    targets = targets.where(weights > 0, 0)  # what does not count may be any number
    if isinstance(logits, LazyLogits):
        return logits.cross_entropy(targets, weights)
    wide = logits.flatten(0, 1).to(weights.dtype)  # (B·L, V): half precision would lose the tail of a sum over V
    # Products and sums instead of a dot product, which autocast would do in half precision.
    loss = (F.cross_entropy(wide, targets.flatten(), reduction="none") * weights.flatten()).sum()
    return loss, ((logits.detach().argmax(-1) == targets) * weights).sum()


def shifted(batch: Batch, weights: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Targets and weights this many places further on, for tokens whose document goes on that far."""
    targets, weights = batch.targets.roll(-by, 1), weights.roll(-by, 1)
    same = batch.segments == batch.segments.roll(-by, 1)
    same[:, -by:] = False
    return targets, weights * same


def layout_of(batch: Batch) -> TokenLayout:
    """Where a batch's tokens stand. Rows that are one unpadded document each take attention's causal fast path."""
    length = batch.tokens.shape[1]
    if (batch.positions[:, -1] == length - 1).all():  # positions restart with every document, so each row is one
        return TokenLayout.whole(*batch.tokens.shape, batch.tokens.device)
    return TokenLayout(batch.positions, batch.segments, valid=batch.segments >= 0, consecutive=True)
