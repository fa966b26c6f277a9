"""Linear layers for decoding one sequence on a CPU, where reading the weights takes most of the time.

    y = x Wᵀ                  the weight stored transposed, read along its rows: fastest on x86
    y = [W₁ x; W₂ x]          the upper and the lower half of W in one loop: fastest on ARM

A matrix-vector product reads memory more slowly than a plain sum. Two interleaved streams of sums read it at full speed
if torch.compile turns them into one loop; eager mode and batches of several rows use the ordinary product. This is for
inference only: it works on a copy of the modules, and checkpoints are not affected.
"""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.replace_modules import AnyModule, copy_modules, replace_modules


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


def optimize_for_cpu_decode(model: AnyModule) -> AnyModule:
    """A copy of the model with these linear layers; all other weights are shared with the original."""
    copy = copy_modules(model)
    linear_type = TwoStreamLinear if platform.machine() in ("aarch64", "arm64") else TransposedLinear

    def make(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return linear_type(module)

    replace_modules(copy, lambda _, module: type(module) is nn.Linear, make)
    return copy
