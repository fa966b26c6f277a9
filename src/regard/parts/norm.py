"""Normalization of each token's vector.

    LayerNorm(x) = (x - mean x) / √(var x + ε) · w + b          Ba et al. 2016
    RMSNorm(x)   = x / √(mean x² + ε) · w                       Zhang & Sennrich 2019
    NoNorm(x)    = x

Both can be used without weights (OLMo's "non-parametric" LayerNorm, Groeneveld et al. 2024). `around_one` is Gemma's
RMSNorm, which scales by 1 + w, so that weight decay pulls the scale to one. Unlike BatchNorm, the output of a token
depends on that token alone.
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
    weight: bool = True

    def check(self) -> None:
        require(self.eps > 0, f"layernorm: eps={self.eps} must be positive")
        require(self.weight or not self.bias, "layernorm: a bias needs a weight; with weight=False set bias=False too")

    def build(self, width: int) -> nn.Module:
        return nn.LayerNorm(width, eps=self.eps, elementwise_affine=self.weight, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm(Norm):
    eps: float = 1e-6
    weight: bool = True
    around_one: bool = False

    def check(self) -> None:
        require(self.eps > 0, f"rmsnorm: eps={self.eps} must be positive")
        require(self.weight or not self.around_one, "rmsnorm: around_one needs a weight; set weight=True")

    def build(self, width: int) -> nn.Module:
        return RMSNormModule(width, self)


class RMSNormModule(nn.Module):
    def __init__(self, width: int, spec: RMSNorm):
        super().__init__()
        start = 0.0 if spec.around_one else 1.0
        self.weight = nn.Parameter(torch.full((width,), start)) if spec.weight else None
        self.eps, self.around_one = spec.eps, spec.around_one

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of half-precision values overflow
        y = F.rms_norm(wide, (x.shape[-1],), eps=self.eps)
        if self.weight is None:
            return y.to(x.dtype)
        if self.around_one:  # in half precision 1 + w would lose digits of w
            return (y * (1 + self.weight.to(y.dtype))).to(x.dtype)
        return y.to(x.dtype) * self.weight


@dataclass(frozen=True)
class NoNorm(Norm):
    """The identity: a sublayer without a norm."""

    def build(self, width: int) -> nn.Module:
        return nn.Identity()
