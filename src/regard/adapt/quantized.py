"""Linear layers whose weights stay in a number format. They are read from it for every product.

    y = W' x + b        W' = format.dequantize(stored)

x has a gradient, W' has none: the layers are frozen, under LoRA (QLoRA, Dettmers et al. 2023) or for inference. The
backward reads W' from the format again, so that training keeps no copy of it.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.formats.base import NumberFormat


class QuantizedLinear(nn.Module):
    """The stored tensors are buffers with the names that the format gives them."""

    def __init__(
        self,
        format: NumberFormat,
        stored: Mapping[str, Tensor],
        shape: tuple[int, int],
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        """shape: (outputs, inputs) of the weight. dtype: of the weight that is read from the format."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.format, self.dtype, self.stored_names = format, dtype, tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)
        self.bias = bias

    @classmethod
    def of(cls, layer: nn.Linear, format: NumberFormat) -> "QuantizedLinear":
        """A layer with the weight of this one, rounded to nearest."""
        shape = (layer.out_features, layer.in_features)
        return cls(format, format.quantize(layer.weight), shape, layer.bias, layer.weight.dtype)

    @property
    def stored(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in self.stored_names}

    @property
    def weight(self) -> Tensor:
        """W' in the dtype that the layer had."""
        return self.format.dequantize(self.stored, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = FrozenProduct.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantized(self) -> nn.Linear:
        """An ordinary layer with the weight W' and the same bias."""
        weight = self.weight
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), self.bias
        return layer

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        """`to(dtype)` changes the dtype of W', not that of what is stored."""
        stored = self.stored
        super()._apply(fn, recurse)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor.to(self.get_buffer(name).device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.kind}"


class FrozenProduct(torch.autograd.Function):
    """x W'ᵀ with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return (grad @ ctx.layer.weight.to(grad.dtype)).to(ctx.dtype), None
