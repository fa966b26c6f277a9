"""Linear layers for decoding one row on a CPU: what a token costs there is the reading of the weights.

    y = [W₁ x; W₂ x]          the upper and the lower half of W's rows, side by side in one loop

A product with one row does not read memory as fast as a plain sum does, two streams of sums written out do, where
torch.compile makes a loop of them. In all other cases (eager, several rows, a GPU) it is the linear layer that it was.
"""

from copy import deepcopy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.surgery import swap

M = TypeVar("M", bound=nn.Module)


class StreamedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() or x.is_cuda or x.numel() > x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        y = torch.cat([(half * x.flatten()).sum(-1) for half in self.weight.chunk(2)]).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def streamed(model: M) -> M:
    """A copy of the modules whose linears read in two streams; every weight is the original's own."""
    copy = deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})
    swap(copy, lambda _, module: type(module) is nn.Linear, stream)
    return copy


def stream(_: str, module: nn.Module) -> nn.Module:
    assert isinstance(module, nn.Linear)
    return StreamedLinear(module)
