"""A block is a tuple of sublayers, each a norm and a body around the residual stream; the style places the norm.

    pre:   x = x + body(norm(x))        Xiong et al. 2020; GPT-2, Llama
    post:  x = norm(x + body(x))        Vaswani et al. 2017

There is one Block: architectures differ in what stands inside, not in classes.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from regard.at import At
from regard.parts.body import Body
from regard.parts.norm import Norm, RMSNorm
from regard.parts.state import FRESH, Memory, State
from regard.spec import Spec, require


@dataclass(frozen=True)
class Sublayer(Spec):
    body: Body
    norm: Norm = RMSNorm()

    def build(self, width: int, style: str, dropout: float) -> nn.Module:
        return SublayerModule(width, self, style, dropout)


@dataclass(frozen=True)
class Block(Spec):
    sublayers: tuple[Sublayer, ...]
    style: Literal["pre", "post"] = "pre"
    dropout: float = 0.0

    def check(self) -> None:
        require(len(self.sublayers) > 0, "block: sublayers is empty; give at least one Sublayer(body)")
        require(0 <= self.dropout < 1, f"block: dropout={self.dropout} must be in [0, 1)")

    def build(self, width: int) -> nn.Module:
        return BlockModule(width, self)

    def memory(self, width: int) -> tuple[Memory, ...]:
        return tuple(s.body.memory(width) for s in self.sublayers)


class SublayerModule(nn.Module):
    def __init__(self, width: int, spec: Sublayer, style: str, dropout: float):
        super().__init__()
        self.norm = spec.norm.build(width)
        self.body = spec.body.build(width)
        self.mixes = spec.body.mixes
        self.pre = style == "pre"
        self.dropout = dropout

    def forward(self, x: Tensor, at: At, state: State) -> Tensor:
        inner = self.norm(x) if self.pre else x
        y = self.body(inner, at, state) if self.mixes else self.body(inner)
        x = x + F.dropout(y, self.dropout, self.training)
        return x if self.pre else self.norm(x)


class BlockModule(nn.Module):
    def __init__(self, width: int, spec: Block):
        super().__init__()
        self.sublayers = nn.ModuleList(s.build(width, spec.style, spec.dropout) for s in spec.sublayers)

    def forward(self, x: Tensor, at: At, states: tuple[State, ...] | None = None) -> Tensor:
        for sublayer, state in zip(self.sublayers, states or [FRESH] * len(self.sublayers), strict=True):
            x = sublayer(x, at, state)
        return x
