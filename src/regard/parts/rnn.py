"""The simple recurrent network as a mixer: h_t = tanh(W_x x_t + W_h h_{t-1} + b). Elman 1990.

The equation, step by step and fused, stands in kernels/recurrent/cells/rnn.py.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from regard.kernels.recurrent.cells import CellStates, rnn
from regard.parts.recurrent import RecurrentCell, RecurrentMixer


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
        return rnn.step(x, *past, self.h_proj, self.activation)

    def fused(self, x: Tensor, sizes: Tensor | None, past: CellStates) -> tuple[Tensor, CellStates]:
        return rnn.fused(x, past, self.x_proj.weight, self.h_proj.weight, self.bias, sizes, self.activation)
