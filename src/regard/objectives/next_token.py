"""Next-token prediction: the objective of autoregressive models, also with images or a source sequence as input.

    next_token, image_text   loss = Σ_t w_t · -log p(token_{t+1} | tokens up to t)
    translation              loss = Σ_t w_t · -log p(target_t | earlier targets, source)       Sutskever et al. 2014

Teacher forcing: the input of the decoder is the true target, shifted right by one after a start token, so one forward
predicts every token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.objectives.base import LossResult, layout_of, padded_layout, token_loss


def next_token(model: nn.Module, batch: Batch) -> LossResult:
    """Needs tokens, targets, weights, positions and segments, all (B, L)."""
    return token_loss(model(batch.tokens, layout_of(batch), outputs=True), batch)


def image_text(model: nn.Module, batch: Batch) -> LossResult:
    """Needs the fields of next_token, and images (B, n, C, height, width): n per row, in the order of their markers.

    The markers that images replace are not targets: their weight is 0.
    """
    return token_loss(model(batch.tokens, layout_of(batch), images=batch.images.flatten(0, 1), outputs=True), batch)


def translation(model: nn.Module, batch: Batch) -> LossResult:
    """Needs source and source_valid (B, S), and the fields of next_token."""
    layout, source_layout = layout_of(batch), padded_layout(batch.get("source_valid"))
    return token_loss(model(batch.source, batch.tokens, source_layout, layout, outputs=True), batch)


def translation_batch(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], start: int, end: int
) -> Batch:
    """A padded batch of sources and targets: the input starts with token `start`, the target ends with `end`."""
    source, source_valid = pad(sources)
    tokens, valid = pad([[start, *target] for target in targets])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Batch(
        source=source,
        source_valid=source_valid,
        tokens=tokens,
        targets=pad([[*target, end] for target in targets])[0],
        weights=valid.float(),
        positions=positions.where(valid, 0),
        segments=valid.long() - 1,
    )


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The rows padded with 0 on the right (B, L), and False for padding (B, L)."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return tokens, torch.arange(longest) < lengths.unsqueeze(-1)
