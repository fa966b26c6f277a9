"""T5's relative positions: a learned bias per head for each bucket of distances, added to the scores.

    score(i, j) = q_i·k_j + table[bucket(j - i), h]        Raffel et al. 2019

Small distances have one bucket each, larger ones share buckets that widen geometrically, and all distances from
`distance` on share the last. T5 has one table for the whole stack (set it in the stack, with `heads`); an attention may
also have its own table.
"""

from dataclasses import dataclass

from torch import nn

from regard.kernels.attention.bias import Buckets
from regard.layout import Bias, TokenLayout
from regard.parts.position.base import Position, PositionModule, PositionPlace
from regard.spec import require


@dataclass(frozen=True)
class T5Buckets(Position):
    places = ("stack", "attention")
    replaces_bias = True

    buckets: int = 32
    distance: int = 128
    bidirectional: bool = False  # separate buckets for later keys (encoders); else later keys count as distance 0
    heads: int | None = None  # only for a stack; an attention uses its own number of heads

    def check(self) -> None:
        exact = self.buckets // (4 if self.bidirectional else 2)
        least = 4 if self.bidirectional else 2
        require(self.buckets >= least, f"t5_buckets: buckets={self.buckets} must be at least {least}")
        require(
            not self.bidirectional or self.buckets % 2 == 0,
            f"t5_buckets: buckets={self.buckets} must be even: each direction has half of them",
        )
        require(
            self.distance > exact,
            f"t5_buckets: distance={self.distance} must be above {exact}: shorter distances have one bucket each",
        )
        require(self.heads is None or self.heads > 0, f"t5_buckets: heads={self.heads} must be positive")

    def check_place(self, place: PositionPlace) -> None:
        if place == "stack":
            require(
                self.heads is not None,
                "t5_buckets: heads=None, but a stack's table needs it; set heads to that of the stack's attentions",
            )
        else:
            require(self.heads is None, f"t5_buckets: heads={self.heads} is for a stack; leave it out here")

    def build(self, dim: int, heads: int, /) -> PositionModule:
        return T5BucketsModule(self, self.heads or heads)


class T5BucketsModule(PositionModule):
    def __init__(self, spec: T5Buckets, heads: int):
        super().__init__()
        self.spec = spec
        self.table = nn.Embedding(spec.buckets, heads)

    def share_bias(self, layout: TokenLayout) -> TokenLayout:
        return layout.with_bias(self.bias(layout))

    def bias(self, layout: TokenLayout) -> Bias:
        return Buckets(self.table.weight, self.spec.distance, self.spec.bidirectional)
