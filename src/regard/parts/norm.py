"""Normalization: bring every token's vector to one scale.

LayerNorm(x) = (x - mean x) / √(var x + ε) · w + b          Ba et al. 2016
RMSNorm(x)   = x / √(mean x² + ε) · w                       Zhang & Sennrich 2019
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.spec import Spec, require


@dataclass(frozen=True)
class Norm(Spec):
    def build(self, width: int) -> nn.Module:
        raise NotImplementedError


@dataclass(frozen=True)
class LayerNorm(Norm):
    eps: float = 1e-5
    bias: bool = True

    def check(self) -> None:
        require(self.eps > 0, f"layernorm: eps={self.eps} must be positive")

    def build(self, width: int) -> nn.Module:
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm(Norm):
    eps: float = 1e-6

    def check(self) -> None:
        require(self.eps > 0, f"rmsnorm: eps={self.eps} must be positive")

    def build(self, width: int) -> nn.Module:
        return RMSNormModule(width, self.eps)


class RMSNormModule(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of half-precision values overflow
        return F.rms_norm(wide, (x.shape[-1],), eps=self.eps).to(x.dtype) * self.weight
