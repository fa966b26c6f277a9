"""Linear layers for decoding one row on a CPU: what a token costs there is the reading of the weights.

    y = x Wᵀ                  the transposed weight, read along its rows: fastest on x86
    y = [W₁ x; W₂ x]          the upper and the lower half of W's rows, side by side in one loop: fastest on ARM

A product with one row reads memory more slowly than a plain sum does. Two streams of sums written out read it as fast,
where torch.compile makes a loop of them; eager, and for several rows, they are the product that they were. This is for
inference: it is done on a copy of the modules, as they are now, and no checkpoint ever sees it.
"""

import platform
from copy import deepcopy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.surgery import swap

ModuleType_ = TypeVar("ModuleType_", bound=nn.Module)


class TransposedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight_t = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=False)  # (in, out)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight_t
        return y if self.bias is None else y + self.bias


class TwoStreamLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > x.shape[-1] or not torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        y = torch.cat([(half * x.flatten()).sum(-1) for half in self.weight.chunk(2)]).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def streamed(model: ModuleType_) -> ModuleType_:
    """A copy of the modules with the linears that it now has made so; all other weights are the original's own."""
    copy = deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})
    kind = TwoStreamLinear if platform.machine() in ("aarch64", "arm64") else TransposedLinear

    def make(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return kind(module)

    swap(copy, lambda _, module: type(module) is nn.Linear, make)
    return copy
