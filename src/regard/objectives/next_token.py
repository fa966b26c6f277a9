"""Next-token prediction: the objective of autoregressive language models, also with images between the tokens.

loss = Σ_t w_t · -log p(token_{t+1} | tokens up to t)
"""

from torch import nn

from regard.data.batch import Batch
from regard.objectives.base import LossResult, layout_of, token_loss


def next_token(model: nn.Module, batch: Batch) -> LossResult:
    """Needs tokens, targets, weights, positions and segments, all (B, L)."""
    return token_loss(model(batch.tokens, layout_of(batch), outputs=True), batch)


def image_text(model: nn.Module, batch: Batch) -> LossResult:
    """Needs the fields of next_token, and images (B, n, C, height, width): n per row, in the order of their markers.

    The markers that images replace are no targets: their weight is 0.
    """
    return token_loss(model(batch.tokens, layout_of(batch), images=batch.images.flatten(0, 1), outputs=True), batch)
