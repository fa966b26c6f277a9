"""Massive activations and the collapse of rank, measured on the residual stream after every layer.

    massive     |x_ic| > 100 and |x_ic| > 1000 · median |x|            few channels of few tokens    Sun et al. 2024
    collapse    |X - 1 x̄ᵀ| / |X| -> 0, the cosine of two tokens -> 1   tokens become alike           Dong et al. 2021

x̄ is the mean over the tokens of a sequence. Massive activations occur mostly at the first token, together with
attention sinks. Both measures are of the stream as it is, before the norm that every sublayer applies to it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lens.hooks import record
from regard.lens.inputs import ModelInputs, residual_names, rows_of

SIZE, RATIO = 100.0, 1000.0  # Sun et al. 2024


class LargeActivation(NamedTuple):
    name: str  # of the residual stream, such as "stack.blocks.3"
    row: int
    position: int
    channel: int
    value: float
    ratio: float  # of its size to the median size of the activations there

    @property
    def massive(self) -> bool:
        """By the limits of Sun et al. 2024."""
        return abs(self.value) > SIZE and self.ratio > RATIO


@dataclass(frozen=True)
class StreamSizes:
    """Per layer, in the order of the layers: the largest size, and the median."""

    largest: dict[str, float]
    median: dict[str, float]
    found: list[LargeActivation]  # the largest first

    @property
    def ratios(self) -> dict[str, float]:
        return {name: size / max(self.median[name], 1e-30) for name, size in self.largest.items()}


def massive_activations(
    model: nn.Module, inputs: ModelInputs, size: float = SIZE, ratio: float = RATIO, most: int = 100
) -> StreamSizes:
    """The sizes of the residual streams for ids (L,) or (B, L), and activations above both limits, at most `most`.

    size: the least |x|. ratio: the least |x| / median |x|, over all tokens and channels of the layer. A model of small
    width has few channels and smaller ratios; lower the limits for it.
    """
    largest, medians, found = {}, {}, []
    for name, x in residual_streams(model, inputs).items():
        sizes = x.abs()
        largest[name], medians[name] = float(sizes.max()), float(sizes.median())
        limit = max(size, ratio * medians[name])
        found += [one for one in largest_activations(name, x, most) if abs(one.value) > limit]
    return StreamSizes(largest, medians, sorted(found, key=lambda one: -abs(one.value))[:most])


def largest_activations(name: str, x: Tensor, count: int) -> list[LargeActivation]:
    """The activations of a stream (B, L, D) with the largest sizes, the largest first."""
    sizes = x.abs()
    best, median = sizes.flatten().topk(min(count, sizes.numel())), max(float(sizes.median()), 1e-30)
    places = torch.stack(torch.unravel_index(best.indices, x.shape), 1).tolist()
    return [
        LargeActivation(name, *place, value=float(x[tuple(place)]), ratio=size / median)
        for place, size in zip(places, best.values.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class RankCollapse:
    """Per layer, in the order of the layers."""

    residual: dict[str, float]  # |X - 1 x̄ᵀ| / |X|: 0 if all tokens are the same vector
    cosine: dict[str, float]  # mean cosine of two different tokens of a sequence


def rank_collapse(model: nn.Module, inputs: ModelInputs) -> RankCollapse:
    """How alike the tokens of a sequence are, after every layer; means over the rows of the input."""
    streams = residual_streams(model, inputs)
    if any(x.shape[1] < 2 for x in streams.values()):
        raise ValueError("one token has no other to be compared with; give two or more")
    return RankCollapse(
        {name: float(distance_from_mean(x).mean()) for name, x in streams.items()},
        {name: float(mean_cosine(x).mean()) for name, x in streams.items()},
    )


@torch.no_grad()
def residual_streams(model: nn.Module, inputs: ModelInputs) -> dict[str, Tensor]:
    """(B, L, D) by name, in at least float32."""
    with record(model, residual_names(model)) as recorded:
        model(*rows_of(model, inputs))
    return {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in recorded.items()}


def distance_from_mean(x: Tensor) -> Tensor:
    """(B, L, D) -> (B,)"""
    return (x - x.mean(1, keepdim=True)).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)


def mean_cosine(x: Tensor) -> Tensor:
    """(B, L, D) -> (B,), over pairs of different tokens"""
    directions, length = F.normalize(x, dim=-1), x.shape[1]
    squares = directions.sum(1).square().sum(-1)  # the cosines of all pairs, each token with itself included
    return (squares - length) / (length * (length - 1))
