"""A block is a tuple of sublayers, each a norm and a body on the residual stream; `style` sets the place of the norm.

    pre:       x = x + body(norm(x))                    Xiong et al. 2020; GPT-2, Llama
    post:      x = norm(x + body(x))                    Vaswani et al. 2017
    parallel:  x = x + body_1(norm(x)) + body_2(norm(x)) + …        GPT-J, PaLM: all bodies read the same x

The stream, to which every body adds, makes a block residual (He et al. 2015). `after` is a second norm, after the body
("sandwich", Gemma 2). `keep` scales the residual stream (DeepNorm, Wang et al. 2022). A constant `share` (the residual
multiplier of Granite) or a learned vector `scale` (LayerScale, Touvron et al. 2021) scales the body's output.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.norm import NoNorm, Norm, RMSNorm
from regard.parts.state import STATELESS, Memory, State, declare_tokens
from regard.spec import Spec, require

Losses = dict[str, Tensor]  # auxiliary losses of bodies in training, by name


@dataclass(frozen=True)
class Sublayer(Spec):
    body: Body
    norm: Norm = RMSNorm()
    after: Norm | None = None
    scale: float | None = None  # initial value of a learned vector

    def build(self, width: int, block: "Block") -> "SublayerModule":
        return SublayerModule(width, self, block)


@dataclass(frozen=True)
class Block(Spec):
    sublayers: tuple[Sublayer, ...]
    style: Literal["pre", "post", "parallel"] = "pre"
    norm: Norm | None = None  # of a parallel block, for all sublayers
    keep: float = 1.0  # factor of the residual stream; 0: the body's output replaces it
    share: float = 1.0  # constant factor of each body's output; Rope.share, a fraction of coordinates, is unrelated
    dropout: float = 0.0

    def check(self) -> None:
        require(len(self.sublayers) > 0, "block: sublayers is empty; add at least one Sublayer(body)")
        require(0 <= self.dropout < 1, f"block: dropout={self.dropout} must be in [0, 1)")
        parallel = self.style == "parallel"
        require(
            self.norm is None or parallel,
            f"block: style={self.style!r} has norms in its sublayers; leave the block's norm out",
        )
        require(
            self.norm is None or all(sublayer.norm == NoNorm() for sublayer in self.sublayers),
            "block: its norm applies to all sublayers, so they need no norms; set norm=NoNorm() in every sublayer",
        )

    def build(self, width: int) -> nn.Module:
        return ParallelBlockModule(width, self) if self.style == "parallel" else BlockModule(width, self)

    def memory(self, width: int) -> tuple[Memory, ...]:
        return tuple(
            declare_tokens(s.body.memory(width), max_exact_cache=s.body.max_exact_cache) for s in self.sublayers
        )


class SublayerModule(nn.Module):
    def __init__(self, width: int, spec: Sublayer, block: Block):
        super().__init__()
        self.norm = spec.norm.build(width)
        self.body = spec.body.build(width)
        self.after = build_norm(spec.after, width)
        self.scale = None if spec.scale is None else nn.Parameter(torch.full((width,), spec.scale))
        self.pre = block.style == "pre"
        self.keep, self.share, self.dropout = block.keep, block.share, block.dropout

    def forward(self, x: Tensor, layout: TokenLayout, state: State) -> tuple[Tensor, Losses]:
        y, losses = self.branch(self.norm(x) if self.pre else x, layout, state)
        x = x + y if self.keep == 1.0 else self.keep * x + y if self.keep else y
        return x if self.pre else self.norm(x), losses

    def branch(self, x: Tensor, layout: TokenLayout, state: State) -> tuple[Tensor, Losses]:
        """The body's contribution to the residual stream, and its auxiliary losses."""
        losses: Losses = {}
        y = self.after(self.body(x, layout.with_losses(losses) if self.training else layout, state))
        y = y if self.scale is None else y * self.scale
        y = y if self.share == 1.0 else y * self.share
        return F.dropout(y, self.dropout, self.training), losses


class BlockModule(nn.Module):
    def __init__(self, width: int, spec: Block):
        super().__init__()
        self.sublayers = nn.ModuleList(s.build(width, spec) for s in spec.sublayers)

    def forward(self, x: Tensor, layout: TokenLayout, states: tuple[State, ...] | None = None) -> tuple[Tensor, Losses]:
        total: Losses = {}
        for sublayer, state in zip(self.sublayers, states or [STATELESS] * len(self.sublayers), strict=True):
            x, losses = sublayer(x, layout, state)
            total = sum_losses(total, losses)
        return x, total


class ParallelBlockModule(nn.Module):
    def __init__(self, width: int, spec: Block):
        super().__init__()
        self.norm = build_norm(spec.norm, width)
        self.sublayers = nn.ModuleList(s.build(width, spec) for s in spec.sublayers)
        self.keep = spec.keep

    def forward(self, x: Tensor, layout: TokenLayout, states: tuple[State, ...] | None = None) -> tuple[Tensor, Losses]:
        inner, total = self.norm(x), {}
        x = x if self.keep == 1.0 else self.keep * x
        for sublayer, state in zip(self.sublayers, states or [STATELESS] * len(self.sublayers), strict=True):
            assert isinstance(sublayer, SublayerModule)
            y, losses = sublayer.branch(sublayer.norm(inner), layout, state)
            x, total = x + y, sum_losses(total, losses)
        return x, total


def build_norm(norm: Norm | None, width: int) -> nn.Module:
    return nn.Identity() if norm is None else norm.build(width)


def sum_losses(a: Losses, b: Losses) -> Losses:
    """The sums of losses with the same name."""
    return a | {name: a[name] + loss if name in a else loss for name, loss in b.items()}
