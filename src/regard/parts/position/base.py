"""The base class of position schemes, and NoPosition, whose four methods are the identity."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from regard.layout import Bias, TokenLayout
from regard.spec import Spec, require

PositionPlace = Literal["stack", "attention"]


@dataclass(frozen=True)
class Position(Spec):
    places: ClassVar[tuple[PositionPlace, ...]] = ("attention",)  # where it has an effect
    replaces_bias: ClassVar[bool] = False  # whether an attention with this position ignores the stack's bias
    absolute: ClassVar[bool] = False  # whether it is added to the embeddings, so that a token's position cannot change

    def check_place(self, place: PositionPlace) -> None:
        """Raise SpecError if it has no effect in this place."""
        require(place in self.places, f"{place}: {self} has no effect here; set it in the {self.places[0]}")

    @property
    def max_positions(self) -> int | None:
        """Number of positions that it supports; None: unlimited."""
        return None

    @property
    def max_exact_cache(self) -> int | None:
        """Positions up to which cached decoding equals a whole forward; None: unlimited.

        A scheme whose frequencies depend on the document's length makes cached keys stale once the document grows.
        """
        return None

    def shift(self, k: Tensor, offsets: Tensor) -> Tensor:
        """The keys (…, E) of this scheme as they would be at positions that are larger by `offsets` (…)."""
        return k

    def build(self, dim: int, heads: int, /) -> "PositionModule":
        """The module; `dim` is the head_dim of the attention, or the width of the stack."""
        raise NotImplementedError(f"{type(self).__name__} has no method build(dim, heads)")


@dataclass(frozen=True)
class NoPosition(Position):
    places = ("stack", "attention")

    def build(self, dim: int, heads: int, /) -> "PositionModule":
        return PositionModule()


class PositionModule(nn.Module):
    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return x

    def rotate(self, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        return q, k

    def share_bias(self, layout: TokenLayout) -> TokenLayout:
        return layout

    def bias(self, layout: TokenLayout) -> Bias | None:
        return layout.inputs.bias


def rope_frequencies(base: float | Tensor, dim: int, layout: TokenLayout) -> Tensor:
    """θ_i = base^(-2i/dim)"""
    return base ** (torch.arange(0, dim, 2, dtype=torch.float64, device=layout.positions.device) / -dim)
