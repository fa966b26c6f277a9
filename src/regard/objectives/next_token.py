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

from regard.at import At
from regard.data.batch import Batch
from regard.models.decoder import Outputs
from regard.models.unembedded import Unembedded
from regard.parts.block import Losses

Objective = Callable[[nn.Module, Batch], tuple[Tensor, Tensor, Mapping[str, Tensor]]]
Result = tuple[Tensor, Tensor, dict[str, Tensor]]


def next_token(model: nn.Module, batch: Batch) -> Result:
    """Needs tokens, targets, weights, positions and segments, all (B, L)."""
    return token_loss(model(batch.tokens, where(batch), outputs=True), batch)


def token_loss(out: Outputs, batch: Batch) -> Result:
    """The losses of what a model has put out for every token, against targets and weights."""
    weights = batch.weights.to(torch.promote_types(out.said.dtype, torch.float32))
    count = weights.sum()
    loss, correct = cross_entropy(out.said, batch.targets, weights)
    metrics = {"accuracy": correct}
    for i, said in enumerate(out.further, start=1):
        further, _ = cross_entropy(said, *shifted(batch, weights, i))
        metrics[f"ahead_{i}"] = further.detach()
        loss = loss + further
    return counted(loss, count, out.losses, metrics)


def counted(loss: Tensor, count: Tensor, losses: Losses, metrics: dict[str, Tensor]) -> Result:
    """With what bodies add: each a mean over this part of the batch, so it weighs as much as any of what is counted."""
    extras = {name: extra * count for name, extra in losses.items()}
    return loss + sum(extras.values()), count, metrics | {name: extra.detach() for name, extra in extras.items()}


def cross_entropy(said: Tensor | Unembedded, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w · -log p(target), and Σ w where the target is the likeliest, of what is said in all places (B, L)."""
    targets = targets.where(weights > 0, 0)  # what does not count may be any number
    if isinstance(said, Unembedded):
        return said.cross_entropy(targets, weights)
    wide = said.flatten(0, 1).to(weights.dtype)  # (B·L, V): half precision would lose the tail of a sum over V
    # Products and sums instead of a dot product, which autocast would do in half precision.
    loss = (F.cross_entropy(wide, targets.flatten(), reduction="none") * weights.flatten()).sum()
    return loss, ((said.detach().argmax(-1) == targets) * weights).sum()


def shifted(batch: Batch, weights: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Targets and weights this many places further on, for tokens whose document goes on that far."""
    targets, weights = batch.targets.roll(-by, 1), weights.roll(-by, 1)
    same = batch.segments == batch.segments.roll(-by, 1)
    same[:, -by:] = False
    return targets, weights * same


def where(batch: Batch) -> At:
    """Where a batch's tokens stand. Rows that are one unpadded document each take attention's causal fast path."""
    length = batch.tokens.shape[1]
    if (batch.positions[:, -1] == length - 1).all():  # positions restart with every document, so each row is one
        return At.whole(*batch.tokens.shape, batch.tokens.device)
    return At(batch.positions, batch.segments, valid=batch.segments >= 0, consecutive=True)
