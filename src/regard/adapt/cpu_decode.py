"""Linear layers for decoding on a CPU, where reading the weights takes most of the time.

    y = (W xᵀ)ᵀ               on x86: with 4 to 64 rows of x, MKL computes this up to twice as fast as x Wᵀ
    y = [W₁ x; W₂ x]          on ARM, one row: the upper and the lower half of W in one loop

On ARM a matrix-vector product reads memory more slowly than a plain sum. Two interleaved streams of sums read it at
full speed if torch.compile turns them into one loop; else the ordinary product is used. This is for inference only: it
works on a copy of the modules, which shares all weights, and checkpoints are not affected.
"""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.replace_modules import AnyModule, copy_modules, replace_modules

SWAPPED_ROWS = range(4, 65)


class SwappedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if not torch.compiler.is_compiling() and rows not in SWAPPED_ROWS:  # compiled once for all numbers of rows
            return F.linear(x, self.weight, self.bias)
        y = (self.weight @ x.reshape(rows, -1).t()).t().contiguous().view(*x.shape[:-1], -1)
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


def optimize_for_cpu_decode(model: AnyModule) -> AnyModule:
    """A copy of the model with these linear layers; all weights are shared with the original."""
    copy = copy_modules(model)
    linear_type = TwoStreamLinear if platform.machine() in ("aarch64", "arm64") else SwappedLinear

    def make(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return linear_type(module)

    replace_modules(copy, lambda _, module: type(module) is nn.Linear, make)
    return copy
