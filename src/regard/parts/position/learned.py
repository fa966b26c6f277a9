"""Learned positions: one trained vector a place, added to the embeddings (GPT-2, BERT).

x_t = E[token_t] + P[t]
"""

from dataclasses import dataclass

from torch import Tensor, nn

from regard.at import At
from regard.parts.position.none import Position, PositionModule
from regard.spec import require


@dataclass(frozen=True)
class Learned(Position):
    places = ("decoder",)

    length: int

    def check(self) -> None:
        require(self.length > 0, f"learned: length={self.length} must be positive")

    @property
    def reach(self) -> int:
        return self.length

    def build(self, width: int, heads: int) -> PositionModule:
        return LearnedModule(self.length, width)


class LearnedModule(PositionModule):
    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Embedding(length, width)

    def embed(self, x: Tensor, at: At) -> Tensor:
        return x + self.table(at.positions)
