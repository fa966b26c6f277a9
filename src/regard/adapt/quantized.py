"""Linear layers whose weights stay in a number format. They are read from it for every product.

    y = W' x + b        W' = format.dequantize(stored)

x has a gradient, W' has none: the layers are frozen, under LoRA (QLoRA, Dettmers et al. 2023) or for inference. The
backward reads W' from the format again, so that training keeps no copy of it.

For inference on a CPU, `pack_weights` reorders the stored numbers for a kernel that multiplies them as they are
(kernels/packed). It rounds x to eight bits, with a scale for 32 inputs:

    |y - W' x| ≤ Σ |W'| d / 2        d = max |x| / 127 of the 32 inputs

On a GPU, integers of 8 and 4 bits and FP8 are expanded in the registers of a kernel (gpu_quantized.py).
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.gpu_quantized import gpu_product, reads_on_gpu
from regard.adapt.packing import Packing, find_packing, pack_stored, unpack_stored
from regard.adapt.replace_modules import replace_modules
from regard.formats.base import NumberFormat
from regard.kernels.packed import packed_linear, why_no_packed_kernel
from regard.spec import SpecError


class QuantizedLinear(nn.Module):
    """The stored tensors are buffers with the names that the format gives them."""

    def __init__(
        self,
        format: NumberFormat,
        stored: Mapping[str, Tensor],
        shape: tuple[int, int],
        bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        """shape: (outputs, inputs) of the weight. dtype: of the weight that is read from the format."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.format, self.dtype, self.stored_names = format, dtype, tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)
        self.bias = bias
        self.packing: Packing | None = None  # of the buffer `packed`, which replaces those of the format

    @classmethod
    def of(cls, layer: nn.Linear, format: NumberFormat) -> "QuantizedLinear":
        """A layer with the weight of this one, rounded to nearest."""
        shape = (layer.out_features, layer.in_features)
        return cls(format, format.quantize(layer.weight), shape, layer.bias, layer.weight.dtype)

    @property
    def stored(self) -> dict[str, Tensor]:
        if self.packing is not None:
            return unpack_stored(self.format, self.get_buffer("packed"), self.packing)
        return {name: self.get_buffer(name) for name in self.stored_names}

    @property
    def weight(self) -> Tensor:
        """W' in the dtype that the layer had."""
        return self.format.dequantize(self.stored, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        exact = x.dtype == torch.float64 or x.requires_grad and torch.is_grad_enabled()
        if exact:
            y = FrozenProduct.apply(x, self)
        elif self.packing is not None and x.device.type == "cpu":
            index, per_header = self.packing.index, self.packing.per_header
            y = packed_linear(x.float(), self.get_buffer("packed"), self.out_features, index, per_header).to(x.dtype)
        elif x.is_cuda and reads_on_gpu(self.format, self.in_features) and self.packing is None:
            y = gpu_product(x, self.format, self.stored)
        else:
            y = FrozenProduct.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def can_pack(self) -> bool:
        on_cpu = all(tensor.device.type == "cpu" for tensor in self.buffers())
        readable = find_packing(self.format, (self.out_features, self.in_features)) is not None
        return on_cpu and readable and self.dtype != torch.float64 and self.packing is None

    def pack(self) -> None:
        """Reorder the stored numbers for the kernel of a CPU."""
        packing = find_packing(self.format, (self.out_features, self.in_features))
        assert packing is not None, f"the kernel does not read {self.format}"
        packed = pack_stored(self.format, self.stored, packing)
        for name in self.stored_names:
            delattr(self, name)
        self.register_buffer("packed", packed, persistent=False)
        self.packing = packing

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packing is not None:
            destination |= {f"{prefix}{name}": tensor for name, tensor in self.stored.items()}

    def dequantized(self) -> nn.Linear:
        """An ordinary layer with the weight W' and the same bias."""
        weight = self.weight
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.register_parameter("bias", self.bias)
        return layer

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        """`to(dtype)` changes the dtype of W', not that of what is stored."""
        stored = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, tensor in stored.items():
            setattr(self, name, tensor.to(self.get_buffer(name).device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.kind}"


def count_stored_weights(model: nn.Module) -> int:
    """The number of weights in quantized layers, which are no parameters."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return sum(layer.in_features * layer.out_features for layer in layers)


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


def quantize_linears(model: nn.Module, format: NumberFormat) -> list[str]:
    """Replace linear layers of a model by layers with rounded weights, in place; returns their names.

    Layers whose shape the format does not allow stay as they are, and so do embeddings, norms, experts and adapters. An
    output layer that shares its matrix with the embedding gets a matrix of its own.
    """

    def match(name: str, module: nn.Module) -> bool:
        return type(module) is nn.Linear and ".lora_" not in name and fits(format, module)

    def make(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return QuantizedLinear.of(module, format)

    return replace_modules(model, match, make)


def fits(format: NumberFormat, layer: nn.Linear) -> bool:
    try:
        format.check_shape(layer.weight.shape)
    except SpecError:
        return False
    return True


def pack_weights(model: nn.Module) -> None:
    """Reorder the weights of quantized layers on a CPU for its kernel, in place. Without one, a warning says why.

    Layers in float64, on other devices, or whose format the kernel does not read stay as they are.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear) and module.can_pack]
    if not layers:
        return
    if reason := why_no_packed_kernel():
        warnings.warn(f"products with weights of few bits are slow here: {reason}", stacklevel=2)
        return
    for layer in layers:
        layer.pack()
