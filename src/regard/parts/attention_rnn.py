"""A recurrence that looks at a source before every step, with the state that it has so far.

    α_ij = softmax_j score(s_{i-1}, h_j)      c_i = Σ_j α_ij h_j      s_i = f(W_x x_i + C c_i + b, s_{i-1})

Bahdanau et al. 2014 ("learning to align"), with a GRU and the additive score. Since c_i needs s_{i-1}, tokens cannot be
read at once, only one after another; Luong et al. 2015 look after the step (`combine` in
parts/scored_attention.py), which can.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from regard.kernels.recurrent.cells import CellStates, unroll
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.recurrent import GRU, RecurrentMixer
from regard.parts.scored_attention import ScoredAttention
from regard.parts.state import STATELESS, Memory, State
from regard.spec import require


@dataclass(frozen=True)
class AttentionRNN(Body):
    mixes: ClassVar[bool] = True

    recurrence: RecurrentMixer = GRU()
    attention: ScoredAttention = ScoredAttention(source=True)

    def check(self) -> None:
        require(self.attention.source, "attentive_recurrence: its attention reads a source; set source=True")
        require(
            not self.attention.combine,
            "attentive_recurrence: its step combines what was found with the state; leave combine out",
        )

    def reading(self, width: int) -> ScoredAttention:
        """The attention, whose source is as wide as this stack unless it says otherwise."""
        return replace(self.attention, source_width=self.attention.source_width or width)

    def build(self, width: int) -> nn.Module:
        return AttentionRNNModule(width, self)

    def memory(self, width: int) -> Memory:
        size = self.recurrence.size(width)
        return self.reading(width).memory(size), self.recurrence.memory(width)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        size, reading = self.recurrence.size(width), self.reading(width)
        wider = (self.recurrence.gates - 1) * size * reading.sizes(size)[0]  # C c is of all gates
        return self.recurrence.flops(width, tokens, keys) + reading.flops(size, tokens, keys) + 2 * tokens * wider


class AttentionRNNModule(nn.Module):
    no_attention_map = "it attends once per recurrent step, with a query that depends on the step before"

    def __init__(self, width: int, spec: AttentionRNN):
        super().__init__()
        size = spec.recurrence.size(width)
        self.recurrence = spec.recurrence.cell(width, size)
        self.attention = spec.reading(width).module(size, spec.recurrence.gates * size)  # its o_proj is C
        self.o_proj = nn.Identity() if size == width else nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        *source, before = state.recall(layout, self.attention.read)
        places = each_token(before)

        def step(x: Tensor, *past: Tensor) -> CellStates:
            c = self.attention.look(past[0].unsqueeze(1), next(places), *source)  # (B, 1, gates · N)
            return self.recurrence.step(x + c.squeeze(1), *past)

        past = self.recurrence.read_state(x, layout, state)
        said, past = unroll(step, self.recurrence.project_inputs(x), past, layout.segments, layout.valid)
        self.recurrence.write_state(past, layout, state)
        return self.o_proj(said)


def each_token(layout: TokenLayout) -> Iterator[TokenLayout]:
    """One query after another, before the same keys."""
    return (layout.tokens(slice(t, t + 1)) for t in range(layout.positions.shape[1]))
