"""A recurrence that attends to a source before every step, with its previous state as the query.

    α_ij = softmax_j score(s_{i-1}, h_j)      c_i = Σ_j α_ij h_j      s_i = f(W_x x_i + C c_i + b, s_{i-1})

Bahdanau et al. 2014 use a GRU and the additive score. Because c_i depends on s_{i-1}, tokens are computed one after the
other. Luong et al. 2015 attend after the step (`combine` in parts/scored_attention.py), for all tokens at once.
"""

from collections.abc import Iterator, Mapping
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
        require(self.attention.source, "attentive_recurrence: its attention reads a source; set attention.source=True")
        require(
            not self.attention.combine,
            "attentive_recurrence: the recurrence combines the context with its state; leave attention.combine out",
        )

    def source_attention(self, width: int) -> ScoredAttention:
        """The attention; its source_width is the width of the stack unless it is set."""
        return replace(self.attention, source_width=self.attention.source_width or width)

    def build(self, width: int) -> nn.Module:
        return AttentionRNNModule(width, self)

    def memory(self, width: int) -> Memory:
        size = self.recurrence.size(width)
        return self.source_attention(width).memory(size), self.recurrence.memory(width)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        size, attention = self.recurrence.size(width), self.source_attention(width)
        context = (self.recurrence.gates - 1) * size * attention.sizes(size)[0]  # C c has the width of all gates
        return self.recurrence.flops(width, tokens, keys) + attention.flops(size, tokens, keys) + 2 * tokens * context


class AttentionRNNModule(nn.Module):
    attention_taps: tuple[str, ...] = ("attention.pattern",)  # one row per step
    reads_source = True

    def __init__(self, width: int, spec: AttentionRNN):
        super().__init__()
        size = spec.recurrence.size(width)
        self.recurrence = spec.recurrence.cell(width, size)
        self.attention = spec.source_attention(width).module(size, spec.recurrence.gates * size)  # its o_proj is C
        self.o_proj = nn.Identity() if size == width else nn.Linear(size, width, bias=False)
        self.heads = spec.attention.heads

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        *source, source_layout = state.read_source(layout, self.attention.cached_arrays)
        queries = single_queries(source_layout)

        def step(x: Tensor, *past: Tensor) -> CellStates:
            c = self.attention.output(past[0].unsqueeze(1), next(queries), *source)  # (B, 1, gates · N)
            return self.recurrence.step(x + c.squeeze(1), *past)

        past = self.recurrence.read_state(x, layout, state)
        hidden, past = unroll(step, self.recurrence.project_inputs(x), past, layout.segments, layout.valid)
        self.recurrence.write_state(past, layout, state)
        return self.o_proj(hidden)

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        return taps["attention.pattern"][:, heads]


def single_queries(layout: TokenLayout) -> Iterator[TokenLayout]:
    """For each query, the layout of this query with all keys."""
    return (layout.tokens(slice(t, t + 1)) for t in range(layout.positions.shape[1]))
