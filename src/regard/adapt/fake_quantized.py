"""Quantization-aware training: linear layers round their weights in every forward, with straight-through gradients.

    y = W' x + b        W' = dequantize(quantize(W))        ∂W' / ∂W := 1

The forward is that of a QuantizedLinear with the same weight, bit for bit, and the gradient is applied to W, which
stays in full precision. Parameters, their names and checkpoints are those of the ordinary layers; the rounded model is
written by `regard quantize RUN OUT`. Jacob et al. 2018 (arXiv:1712.05877); straight-through: Bengio et al. 2013.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.replace_modules import replace_modules
from regard.formats.base import NumberFormat
from regard.formats.integers import Integer
from regard.parts.experts import GroupedLinear
from regard.spec import Spec, SpecError, require


@dataclass(frozen=True)
class FakeQuantization(Spec):
    """Which linear layers are rounded in training; as in `regard quantize`, not the head unless `head` is true."""

    format: NumberFormat = Integer(4, symmetric=False, group=64, scale_dtype="float16")
    skip: tuple[str, ...] = ()  # patterns of the names of layers that are not rounded
    head: bool = False


class FakeQuantizedLinear(nn.Linear):
    def __init__(self, linear: nn.Linear, format: NumberFormat):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.format = linear.weight, linear.bias, format

    def forward(self, input: Tensor) -> Tensor:
        y = F.linear(input, StraightThrough.apply(self.weight, self.format).to(input.dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)  # apart, as in a QuantizedLinear


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, format: NumberFormat) -> Tensor:
        return format.dequantize(format.quantize(weight), weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def fake_quantize(model: nn.Module, settings: FakeQuantization) -> list[str]:
    """Replace the linear layers of the blocks, and the head on request, in place; returns their names."""
    stacked = next((name for name, module in model.named_modules() if isinstance(module, GroupedLinear)), None)
    require(stacked is None, f"quantize: {stacked} is a stacked weight of experts, which is not rounded; omit quantize")

    def match(name: str, module: nn.Module) -> bool:
        inside = ".blocks." in f".{name}" or name == "head" and settings.head
        return type(module) is nn.Linear and inside and not any(fnmatchcase(name, skip) for skip in settings.skip)

    def make(name: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        try:
            settings.format.check_shape(module.weight.shape)
        except SpecError as error:
            raise SpecError(f"quantize: {name}: {error}, or leave the layer out: quantize.skip") from error
        return FakeQuantizedLinear(module, settings.format)

    names = replace_modules(model, match, make)
    require(bool(names), "quantize: no linear layer of a block is left; check quantize.skip")
    return names
