"""Learned positions: one trained vector per position, added to the embeddings (GPT-2, BERT).

x_t = E[token_t] + P[t + offset]

A position beyond the table is an error. The tables of OPT start with two rows that no token uses (offset=2); the table
of Whisper's encoder is not trained (frozen).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.parts.position.base import Position, PositionModule
from regard.spec import require


@dataclass(frozen=True)
class Learned(Position):
    places = ("stack",)
    absolute = True

    length: int
    offset: int = 0
    frozen: bool = False  # read from checkpoints, not trained

    def check(self) -> None:
        require(self.length > 0, f"learned: length={self.length} must be positive")
        require(self.offset >= 0, f"learned: offset={self.offset} must not be negative")

    @property
    def max_positions(self) -> int:
        return self.length

    def build(self, width: int, heads: int, /) -> PositionModule:
        return LearnedModule(self, width)


class LearnedModule(PositionModule):
    def __init__(self, spec: Learned, width: int):
        super().__init__()
        self.spec = spec
        self.table = nn.Embedding(spec.length + spec.offset, width).requires_grad_(not spec.frozen)

    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        # Only on the CPU: on a GPU the check would synchronize, and the embedding lookup itself raises an error.
        if layout.positions.device.type == "cpu" and not torch.compiler.is_compiling():
            last = int(layout.positions.max())
            if last >= self.spec.length:
                raise ValueError(
                    f"position {last} is beyond the {self.spec.length} learned positions; shorten the sequence"
                )
        return x + self.table(layout.positions + self.spec.offset)
