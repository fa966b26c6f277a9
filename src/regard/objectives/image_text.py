"""Predict the next token of a text with images in it; places that images take are no targets (weight 0)."""

from torch import nn

from regard.data.batch import Batch
from regard.objectives.next_token import LossResult, layout_of, token_loss


def image_text(model: nn.Module, batch: Batch) -> LossResult:
    """Needs images (B, n, C, height, width), n a row in the order of their places, and what next_token needs."""
    return token_loss(model(batch.tokens, layout_of(batch), images=batch.images.flatten(0, 1), outputs=True), batch)
