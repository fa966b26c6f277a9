"""The interface of an objective, and the functions that several objectives share.

    loss = Σ_t w_t · -log p(target_t)  /  Σ_t w_t

An objective returns the two sums separately. The training step divides once, over the whole step, so the loss does not
depend on how a batch is split for accumulation, how documents are packed into rows, or how rows are distributed over
ranks. Metrics are sums too and are divided by the same count. Padding has weight 0.

Auxiliary losses of the bodies (load balancing of experts) are means over one micro-batch, not sums over tokens. They
are multiplied by the count, so a step averages them over its micro-batches, weighted by their counts.
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
LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]  # loss_sum, count, metrics


def token_loss(outputs: Outputs, batch: Batch) -> LossResult:
    """The cross-entropy of every token, and that of the multi-token prediction (`ahead`) blocks.

    The targets of those blocks are further ahead.
    """
    weights = batch.weights.to(torch.promote_types(outputs.logits.dtype, torch.float32))
    count = weights.sum()
    loss, correct = cross_entropy(outputs.logits, batch.targets, weights)
    metrics = {"accuracy": correct}
    for i, logits in enumerate(outputs.ahead_logits, start=1):
        ahead, _ = cross_entropy(logits, *shifted(batch, weights, i))
        metrics[f"ahead_{i}"] = ahead.detach()
        loss = loss + ahead
    return add_losses(loss, count, outputs.losses, metrics)


def add_losses(loss: Tensor, count: Tensor, losses: Losses, metrics: dict[str, Tensor]) -> LossResult:
    """Add the auxiliary losses of the bodies to the loss, and to the metrics."""
    sums = {name: mean * count for name, mean in losses.items()}
    return loss + sum(sums.values()), count, metrics | {name: value.detach() for name, value in sums.items()}


def cross_entropy(logits: Tensor | LazyLogits, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w · -log p(target), and Σ w over the tokens whose target has the largest logit; targets and weights (B, L)."""
    targets = targets.where(weights > 0, 0)  # a target of weight 0 may be any number, even an invalid id
    if isinstance(logits, LazyLogits):
        return logits.cross_entropy(targets, weights)
    wide = logits.flatten(0, 1).to(weights.dtype)  # (B·L, V): a sum over V in half precision would lose the small terms
    # Products and sums instead of a dot product, which autocast would compute in half precision.
    loss = (F.cross_entropy(wide, targets.flatten(), reduction="none") * weights.flatten()).sum()
    return loss, ((logits.detach().argmax(-1) == targets) * weights).sum()


def shifted(batch: Batch, weights: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Targets and weights `by` tokens further ahead; weight 0 where that is outside the token's document."""
    targets, weights = batch.targets.roll(-by, 1), weights.roll(-by, 1)
    same_document = batch.segments == batch.segments.roll(-by, 1)
    same_document[:, -by:] = False
    return targets, weights * same_document


def layout_of(batch: Batch) -> TokenLayout:
    """The layout of a packed batch. If every row is one unpadded document, attention takes its causal fast path."""
    length = batch.tokens.shape[1]
    if (batch.positions[:, -1] == length - 1).all():  # positions restart with every document, so each row is one
        return TokenLayout.whole(*batch.tokens.shape, batch.tokens.device)
    return TokenLayout(batch.positions, batch.segments, valid=batch.segments >= 0, consecutive=True)


def padded_layout(valid: Tensor | None) -> TokenLayout | None:
    """The layout of rows with one sequence each, padded on either side."""
    return None if valid is None else TokenLayout((valid.cumsum(-1) - 1).clamp_min(0), valid=valid, consecutive=True)
