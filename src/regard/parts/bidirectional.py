"""Two recurrences, one from left to right and one from right to left.

    out_t = [h→_t ; h←_t]          h→_t = f(x_t, h→_{t-1})      h←_t = f(x_t, h←_{t+1})

For encoders: the output of a token depends on the whole sequence. The final state is [h→_L ; h←_1], in which each
direction has read all tokens. Schuster & Paliwal 1997; Bahdanau et al. 2014.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.recurrent import RecurrentMixer
from regard.parts.state import STATELESS, FinalState, FixedSize, FixedState
from regard.spec import require


@dataclass(frozen=True)
class Bidirectional(Body):
    mixes: ClassVar[bool] = True

    recurrence: RecurrentMixer  # its `hidden` is the width of one direction; None: half of the stack's

    @property
    def causal(self) -> bool:
        return False

    def size(self, width: int) -> int:
        """Width of the state of one direction."""
        require(
            self.recurrence.hidden is not None or width % 2 == 0,
            f"bidirectional: width={width} is odd, so a direction cannot have half of it; set hidden",
        )
        return self.recurrence.hidden or width // 2

    def build(self, width: int) -> nn.Module:
        return BidirectionalModule(width, self)

    def memory(self, width: int) -> FixedSize:
        """The final state, from which a decoder may start; a later forward does not continue it."""
        return FixedSize({name: (2 * self.size(width),) for name in self.recurrence.states})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        size = self.size(width)
        out = 0 if 2 * size == width else 2 * size * width
        return 2 * tokens * (2 * self.recurrence.gates * size * (width + size) + out)


class BidirectionalModule(nn.Module):
    no_attention_map = "the state is no linear function of the inputs; record the outputs of `ahead` and `back`"

    def __init__(self, width: int, spec: Bidirectional):
        super().__init__()
        size = spec.size(width)
        self.ahead = spec.recurrence.cell(width, size)
        self.back = spec.recurrence.cell(width, size)
        self.o_proj = nn.Identity() if 2 * size == width else nn.Linear(2 * size, width, bias=False)

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        ends = FinalState(), FinalState()
        ahead = self.ahead(x, layout, ends[0])  # (B, L, N)
        back = self.back(x.flip(1), layout.derived(reverse), ends[1]).flip(1)  # (B, L, N)
        state.write(layout, **{name: torch.cat([end.arrays[name] for end in ends], -1) for name in ends[0].arrays})
        return self.o_proj(torch.cat([ahead, back], -1))


def reverse(layout: TokenLayout) -> TokenLayout:
    """The same tokens from right to left."""
    return replace(
        layout,
        positions=layout.positions.flip(1),
        segments=None if layout.segments is None else layout.segments.flip(1),
        valid=None if layout.valid is None else layout.valid.flip(1),
        ordered=False,
        consecutive=False,
    )
