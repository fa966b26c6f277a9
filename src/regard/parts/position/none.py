"""No position: the identity of all three methods, and the base of the schemes that need only some of them."""

from dataclasses import dataclass

from torch import Tensor, nn

from regard.at import At
from regard.kernels.attention.bias import Bias
from regard.spec import Spec


@dataclass(frozen=True)
class Position(Spec):
    @property
    def reach(self) -> int | None:
        """How many positions it knows; None: there is no end."""
        return None

    def build(self, width: int, heads: int) -> "PositionModule":
        """For a stack or an attention of this many heads, each (or the stack) this wide."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoPosition(Position):
    def build(self, width: int, heads: int) -> "PositionModule":
        return PositionModule()


class PositionModule(nn.Module):
    def embed(self, x: Tensor, at: At) -> Tensor:
        return x

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        return q, k

    def bias(self, at: At) -> Bias | None:
        return None
