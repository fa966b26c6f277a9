"""Recurrent mixers: each token updates a hidden state of fixed size.

    h_t = f(W_x x_t + b, W_h h_{t-1})          out_t = h_t, or W_o h_t if the state has another width than the stack

    RNN    h = tanh(W_x x + W_h h + b)                                                       Elman 1990
    LSTM   a second state, the cell c, that only the gates change          Hochreiter & Schmidhuber 1997
    GRU    one state and three quarters of an LSTM's weights                           Cho et al. 2014

The equations of f, step by step and fused, are in kernels/recurrent/cells. A layer of torch.nn.LSTM is a block without
norm and residual: Block((Sublayer(LSTM(), NoNorm()),), keep=0.0).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from regard.compat import outside_graphs
from regard.kernels.recurrent.cells import (
    CellStates,
    fused_gru,
    fused_lstm,
    fused_rnn,
    gru_step,
    lstm_step,
    rnn_step,
    unroll,
)
from regard.kernels.recurrent.cells.documents import pack_documents, run_packed
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.spec import require


@dataclass(frozen=True)
class RecurrentMixer(Body):
    mixes: ClassVar[bool] = True
    states: ClassVar[tuple[str, ...]] = ("h",)
    gates: ClassVar[int] = 1  # W_x and W_h each stack this many matrices

    hidden: int | None = None  # width of the state; None: that of the stack
    bias: bool = True

    def check(self) -> None:
        require(self.hidden is None or self.hidden > 0, f"{self.kind}: hidden={self.hidden} must be positive")

    def size(self, width: int) -> int:
        return self.hidden or width

    def cell(self, width: int, size: int) -> "RecurrentCell":
        """The module of the recurrence, from inputs of `width` to states of `size`."""
        raise NotImplementedError

    def build(self, width: int) -> nn.Module:
        return RecurrentMixerModule(width, self)

    def memory(self, width: int) -> FixedSize:
        return FixedSize({name: (self.size(width),) for name in self.states})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        size = self.size(width)
        out = 0 if size == width else size * width
        return 2 * tokens * (self.gates * size * (width + size) + out)


class RecurrentMixerModule(nn.Module):
    no_attention_map = "the state is no linear function of the inputs; `regard lens --states` shows the states"

    def __init__(self, width: int, spec: RecurrentMixer):
        super().__init__()
        size = spec.size(width)
        self.recurrence = spec.cell(width, size)
        self.o_proj = nn.Identity() if size == width else nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        return self.o_proj(self.recurrence(x, layout, state))


class RecurrentCell(nn.Module):
    """W_x, W_h and b of all gates, stacked; a subclass defines the step."""

    can_fuse = True  # whether torch has a fused operation for all steps

    def __init__(self, width: int, size: int, spec: RecurrentMixer):
        super().__init__()
        self.size, self.states = size, spec.states
        self.x_proj = nn.Linear(width, spec.gates * size, bias=False)
        self.h_proj = nn.Linear(size, spec.gates * size, bias=False)
        self.bias = nn.Parameter(torch.zeros(spec.gates * size)) if spec.bias else None

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        """(B, L, D) -> the hidden states (B, L, N)"""
        hidden, past = self.run(x, self.read_state(x, layout, state), layout)
        self.write_state(past, layout, state)
        return hidden

    def read_state(self, x: Tensor, layout: TokenLayout, state: FixedState) -> CellStates:
        empty = x.new_zeros(len(x), self.size)
        return tuple(array.to(x.dtype) for array in state.read(layout, **dict.fromkeys(self.states, empty)))

    def write_state(self, past: CellStates, layout: TokenLayout, state: FixedState) -> None:
        state.write(layout, **dict(zip(self.states, past, strict=True)))

    def run(self, x: Tensor, past: CellStates, layout: TokenLayout) -> tuple[Tensor, CellStates]:
        """Run all steps, fused if possible; the fused operation would bypass adapters and hooks."""
        unmodified = all(type(module) is nn.Linear and not has_hooks(module) for module in self.children())
        # not every fused operation supports half precision on the CPU
        autocast = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if not self.can_fuse or not unmodified or autocast or x.shape[1] == 1:
            return unroll(self.step, self.project_inputs(x), past, layout.segments, layout.valid)
        return run_fused(self, x, past, layout)

    def project_inputs(self, x: Tensor) -> Tensor:
        """W_x x + b for all tokens in one product."""
        return self.x_proj(x) if self.bias is None else self.x_proj(x) + self.bias

    def step(self, x: Tensor, *past: Tensor) -> CellStates:
        raise NotImplementedError

    def fused(self, x: Tensor, batch_sizes: Tensor | None, past: CellStates) -> tuple[Tensor, CellStates]:
        # batch_sizes: as in PackedSequence; None: all rows have full length
        raise NotImplementedError


@outside_graphs
def run_fused(cell: RecurrentCell, x: Tensor, past: CellStates, layout: TokenLayout) -> tuple[Tensor, CellStates]:
    if layout.segments is None and layout.valid is None:
        return cell.fused(x, None, past)
    return run_packed(cell.fused, x, past, layout.derived(pack_documents))


def has_hooks(module: nn.Module) -> bool:
    """Whether it has forward hooks, which the fused operation would not call."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@dataclass(frozen=True)
class RNN(RecurrentMixer):
    activation: Literal["tanh", "relu"] = "tanh"

    def cell(self, width: int, size: int) -> RecurrentCell:
        return RNNModule(width, size, self)


class RNNModule(RecurrentCell):
    def __init__(self, width: int, size: int, spec: RNN):
        super().__init__(width, size, spec)
        self.activation = spec.activation

    def step(self, x: Tensor, *past: Tensor) -> CellStates:
        return rnn_step(x, *past, self.h_proj, self.activation)

    def fused(self, x: Tensor, batch_sizes: Tensor | None, past: CellStates) -> tuple[Tensor, CellStates]:
        return fused_rnn(x, past, self.x_proj.weight, self.h_proj.weight, self.bias, batch_sizes, self.activation)


@dataclass(frozen=True)
class LSTM(RecurrentMixer):
    states: ClassVar[tuple[str, ...]] = ("h", "c")
    gates: ClassVar[int] = 4

    def cell(self, width: int, size: int) -> RecurrentCell:
        return LSTMModule(width, size, self)


class LSTMModule(RecurrentCell):
    def __init__(self, width: int, size: int, spec: LSTM):
        super().__init__(width, size, spec)
        if self.bias is not None:
            with torch.no_grad():  # the forget gate starts mostly open (Gers et al. 2000, Jozefowicz et al. 2015)
                self.bias[size : 2 * size] = 1.0

    def step(self, x: Tensor, *past: Tensor) -> CellStates:
        return lstm_step(x, *past, self.h_proj)

    def fused(self, x: Tensor, batch_sizes: Tensor | None, past: CellStates) -> tuple[Tensor, CellStates]:
        return fused_lstm(x, past, self.x_proj.weight, self.h_proj.weight, self.bias, batch_sizes)


@dataclass(frozen=True)
class GRU(RecurrentMixer):
    gates: ClassVar[int] = 3

    # The reset gate applies before or after the product with W_h; "after", as in torch.nn.GRU, is faster.
    reset: Literal["before", "after"] = "after"

    def cell(self, width: int, size: int) -> RecurrentCell:
        return GRUModule(width, size, self)


class GRUModule(RecurrentCell):
    def __init__(self, width: int, size: int, spec: GRU):
        super().__init__(width, size, spec)
        self.reset, self.can_fuse = spec.reset, spec.reset == "after"
        self.h_proj = nn.Linear(size, 2 * size, bias=False)
        self.n_proj = nn.Linear(size, size, bias=spec.bias and self.can_fuse)

    def step(self, x: Tensor, *past: Tensor) -> CellStates:
        return gru_step(x, *past, self.h_proj, self.n_proj, self.reset)

    def fused(self, x: Tensor, batch_sizes: Tensor | None, past: CellStates) -> tuple[Tensor, CellStates]:
        weights = (self.x_proj.weight, self.h_proj.weight, self.n_proj.weight, self.bias, self.n_proj.bias)
        return fused_gru(x, past, *weights, batch_sizes)
