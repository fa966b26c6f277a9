"""The gated recurrent unit as a mixer: three quarters of an LSTM's weights, and one state. Cho et al. 2014.

The equations, with the reset gate before or after the product, stand in kernels/recurrent/cells/gru.py.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from regard.kernels.recurrent.cells import CellStates, gru
from regard.parts.recurrent import RecurrentCell, RecurrentMixer


@dataclass(frozen=True)
class GRU(RecurrentMixer):
    gates: ClassVar[int] = 3

    reset: Literal["before", "after"] = "after"  # the matrix product; after, as torch.nn.GRU, is faster

    def cell(self, width: int, size: int) -> RecurrentCell:
        return GRUModule(width, size, self)


class GRUModule(RecurrentCell):
    def __init__(self, width: int, size: int, spec: GRU):
        super().__init__(width, size, spec)
        self.reset, self.can_fuse = spec.reset, spec.reset == "after"
        self.h_proj = nn.Linear(size, 2 * size, bias=False)
        self.n_proj = nn.Linear(size, size, bias=spec.bias and self.can_fuse)

    def step(self, x: Tensor, *past: Tensor) -> CellStates:
        return gru.step(x, *past, self.h_proj, self.n_proj, self.reset)

    def fused(self, x: Tensor, sizes: Tensor | None, past: CellStates) -> tuple[Tensor, CellStates]:
        weights = (self.x_proj.weight, self.h_proj.weight, self.n_proj.weight, self.bias, self.n_proj.bias)
        return gru.fused(x, past, *weights, sizes)
