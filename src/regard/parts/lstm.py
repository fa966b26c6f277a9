"""Long short-term memory as a mixer: beside what it says, h, it carries a cell, c, that only gates change.

The equations, step by step and fused, are in kernels/recurrent/cells/lstm.py. Hochreiter & Schmidhuber 1997. The forget
gate begins with a bias of 1, so that a fresh cell keeps more than it loses (Gers et al. 2000, Jozefowicz et al. 2015).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.kernels.recurrent.cells import CellStates, lstm
from regard.parts.recurrent import RecurrentCell, RecurrentMixer


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
            with torch.no_grad():
                self.bias[size : 2 * size] = 1.0

    def step(self, x: Tensor, *past: Tensor) -> CellStates:
        return lstm.step(x, *past, self.h_proj)

    def fused(self, x: Tensor, sizes: Tensor | None, past: CellStates) -> tuple[Tensor, CellStates]:
        return lstm.fused(x, past, self.x_proj.weight, self.h_proj.weight, self.bias, sizes)
