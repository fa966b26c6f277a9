"""No position: the identity of all four methods, and the base of the schemes that need only some of them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from regard.kernels.attention.bias import Bias
from regard.layout import TokenLayout
from regard.spec import Spec, require

PositionPlace = Literal["stack", "attention"]


@dataclass(frozen=True)
class Position(Spec):
    places: ClassVar[tuple[PositionPlace, ...]]  # where it has an effect
    replaces_bias: ClassVar[bool] = False  # does an attention with it ignore the stack's bias?

    def check_place(self, place: PositionPlace) -> None:
        """Raise SpecError where it would change nothing."""
        require(place in self.places, f"{place}: {self} does nothing here; give it to the {self.places[0]}")

    @property
    def reach(self) -> int | None:
        """How many positions it knows; None: there is no end."""
        return None

    @property
    def max_exact_cache(self) -> int | None:
        """How many positions a cache may hold and still be exact; None: there is no end.

        A scheme that treats a token differently once its document has grown makes what was remembered wrong: keys,
        and the hidden states of all layers above. Within this many positions cached = whole.
        """
        return None

    def build(self, width: int, heads: int) -> "PositionModule":
        """For a stack or an attention of this many heads, each (or the stack) this wide."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoPosition(Position):
    places = ("stack", "attention")

    def build(self, width: int, heads: int) -> "PositionModule":
        return PositionModule()


class PositionModule(nn.Module):
    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return x

    def rotate(self, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        return q, k

    def share(self, layout: TokenLayout) -> TokenLayout:
        return layout

    def bias(self, layout: TokenLayout) -> Bias | None:
        return layout.inputs.bias


def rope_frequencies(base: float | Tensor, dim: int, layout: TokenLayout) -> Tensor:
    """θ_i = base^(-2i/dim)"""
    return base ** (torch.arange(0, dim, 2, dtype=torch.float64, device=layout.positions.device) / -dim)
