"""The log-probabilities of whole sequences, several of which may share a row of a batch as its segments.

log π(y | x) = Σ_t w_t log p(y_t | x, y_<t)
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.models.outputs import LazyLogits, token_logprobs
from regard.objectives.base import layout_of
from regard.parts.block import Losses


class TokenScores(NamedTuple):
    """All (B, L), and 0 for tokens that do not count."""

    logprobs: Tensor  # log p(target)
    entropies: Tensor  # without gradient
    values: Tensor | None = None  # of a model with a value head


def score_tokens(model: nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[TokenScores, Losses]:
    """The scores of the tokens that count, and the auxiliary losses of the model.

    Needs tokens, targets, weights, positions and segments, all (B, L). Only the logits of tokens that count are
    computed.
    """
    outputs = model(batch.tokens, layout_of(batch), outputs=True)
    counted, logits = batch.weights > 0, outputs.logits
    logits = logits.select(counted) if isinstance(logits, LazyLogits) else logits[counted]
    logprobs, entropies = token_logprobs(logits, batch.targets[counted], temperature)
    values = None if outputs.values is None else outputs.values.where(counted, 0)
    return TokenScores(spread(logprobs, counted), spread(entropies, counted), values), outputs.losses


def spread(values: Tensor, chosen: Tensor) -> Tensor:
    """The values at the chosen places of a tensor of zeros."""
    return values.new_zeros(chosen.shape).masked_scatter(chosen, values)


def sum_segments(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """Values and segments (B, L) -> the sum of each of the first `count` segments (B, count); padding is left out."""
    inside = segments >= 0
    sums = values.new_zeros(len(values), count)
    return sums.scatter_add(1, segments.clamp_min(0), torch.where(inside, values, 0))


def sequence_logprobs(model: nn.Module, batch: Batch, count: int) -> tuple[Tensor, Tensor, Losses]:
    """log π of the first `count` segments of every row, their numbers of tokens that count, both (B, count), and the
    auxiliary losses of the model."""
    scores, losses = score_tokens(model, batch)
    lengths = sum_segments((batch.weights > 0).to(scores.logprobs.dtype), batch.segments, count)
    return sum_segments(scores.logprobs * batch.weights, batch.segments, count), lengths, losses


def sum_sequences(values: Tensor, segments: Tensor) -> Tensor:
    """Values of tokens (B, L) -> for every token the sum over its own sequence (B, L)."""
    return sum_segments(values, segments, segments.shape[1]).gather(1, segments.clamp_min(0))
