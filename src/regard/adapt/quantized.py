"""Linear layers whose weights stay in a number format. They are read from it for every product.

    y = W' x + b        W' = format.dequantize(stored)

x has a gradient, W' has none: the layers are frozen, under LoRA (QLoRA, Dettmers et al. 2023) or for inference. The
backward reads W' from the format again, so that training keeps no copy of it.

Where gradients are disabled (`torch.no_grad`, `torch.inference_mode`) kernels multiply the stored numbers as they are.
For that of a CPU (kernels/packed), `pack_weights` reorders them. It rounds x to eight bits, with a scale for 32 inputs:

    |y - W' x| ≤ Σ |W'| d / 2        d = max |x| / 127 of the 32 inputs

On a GPU, integers of 8 and 4 bits and FP8 are expanded in the registers of a kernel (gpu_quantized.py). Where gradients
are enabled, and in float64, no layer rounds x.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.gpu_quantized import gpu_product, reads_on_gpu
from regard.adapt.packing import Packing, find_packing, pack_stored, unpack_stored
from regard.adapt.replace_modules import replace_modules
from regard.adapt.stored_weight import StoredWeight
from regard.formats.base import NumberFormat
from regard.kernels.grouped_matmul import expert_rows, row_experts
from regard.kernels.packed import packed_linear, why_no_packed_kernel
from regard.parts.experts import GroupedLinear
from regard.spec import SpecError


class QuantizedLinear(StoredWeight):
    def __init__(
        self,
        format: NumberFormat,
        stored: Mapping[str, Tensor],
        shape: tuple[int, ...],
        bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        """shape: (outputs, inputs) of the weight. dtype: of the weight that is read from the format."""
        super().__init__(format, stored, dtype)
        self.out_features, self.in_features = shape
        self.bias = bias
        self.packing: Packing | None = None  # of the buffer `packed`, which replaces those of the format

    @classmethod
    def of(cls, layer: nn.Linear, format: NumberFormat) -> "QuantizedLinear":
        """A layer with the weight of this one, rounded to nearest."""
        shape = (layer.out_features, layer.in_features)
        return cls(format, format.quantize(layer.weight), shape, layer.bias, layer.weight.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, which would have to be read from its format."""
        return self.out_features, self.in_features

    @property
    def stored(self) -> dict[str, Tensor]:
        if self.packing is not None:
            return unpack_stored(self.format, self.get_buffer("packed"), self.packing)
        return super().stored

    def forward(self, x: Tensor) -> Tensor:
        exact = x.dtype == torch.float64 or torch.is_grad_enabled()  # the same for all layers of a forward
        if self.packing is not None and not exact:
            index, per_header = self.packing.index, self.packing.per_header
            y = packed_linear(x.float(), self.get_buffer("packed"), self.out_features, index, per_header).to(x.dtype)
        elif x.is_cuda and not exact and reads_on_gpu(self.format, self.in_features):
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

    def unpack(self) -> None:
        """The inverse of `pack`."""
        stored = self.stored
        del self.packed
        self.packing = None
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packing is not None:
            destination |= {f"{prefix}{name}": tensor for name, tensor in self.stored.items()}

    def dequantized(self) -> nn.Linear | GroupedLinear:
        """An ordinary layer with the weight W' and the same bias."""
        weight = self.weight
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.register_parameter("bias", self.bias)
        return layer

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self.packing is not None and fn(torch.empty(0)).device.type != "cpu":
            self.unpack()  # the order of the packed numbers is that of the CPU's kernel
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.kind}"


class QuantizedExperts(QuantizedLinear):
    """One matrix per expert (parts/experts.py), each stored by itself: only those of used experts are read.

    y_t = W'_e x_t + b_e        for the rows t of expert e
    """

    can_pack = False  # the kernel of a CPU multiplies one matrix

    def __init__(
        self,
        format: NumberFormat,
        stored: Mapping[str, Tensor],
        shape: tuple[int, ...],
        bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        """stored: tensors of the format, stacked by expert. shape: (experts, outputs, inputs)."""
        self.experts, outputs, inputs = shape
        super().__init__(format, stored, (outputs, inputs), bias, dtype)

    @classmethod
    def of(cls, layer: GroupedLinear, format: NumberFormat) -> "QuantizedExperts":  # ty: ignore[incompatible-method-override]
        stored = stack_stored([format.quantize(matrix) for matrix in layer.weight])
        return cls(format, stored, tuple(layer.weight.shape), layer.bias, layer.weight.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts, self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:
        return torch.stack([self.matrix(expert) for expert in range(self.experts)])  # (X, O, I)

    def matrix(self, expert: int) -> Tensor:
        return self.format.dequantize({name: tensor[expert] for name, tensor in self.stored.items()}, self.dtype)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:  # ty: ignore[incompatible-method-override]
        """x (T, I) -> (T, O); the rows of expert e end at ends[e]"""
        y = FrozenExpertProduct.apply(x, ends, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)[row_experts(x, ends)]

    def dequantized(self) -> GroupedLinear:
        with torch.device("meta"):
            layer = GroupedLinear(*self.shape[:1], self.in_features, self.out_features, bias=False)
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.bias = self.bias
        return layer

    def extra_repr(self) -> str:
        return f"experts={self.experts}, {super().extra_repr()}"


def stack_stored(stored: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a format stores of the matrix of each expert -> tensors with experts as their first dimension."""
    return {name: torch.stack([expert[name] for expert in stored]) for name in stored[0]}


def stored_like(format: NumberFormat, shape: Sequence[int]) -> dict[str, Tensor]:
    """Tensors on the meta device like those of a quantized layer with this weight, of one matrix or one per expert."""
    *experts, outputs, inputs = shape
    return {
        name: torch.empty(*experts, *like.shape, dtype=like.dtype, device="meta")
        for name, like in format.stored_like((outputs, inputs)).items()
    }


def count_stored_weights(model: nn.Module) -> int:
    """The number of weights in quantized layers, which are no parameters."""
    return sum(math.prod(module.shape) for module in model.modules() if isinstance(module, QuantizedLinear))


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


class FrozenExpertProduct(torch.autograd.Function):
    """The rows of each expert times its matrix, with the gradient of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, layer: QuantizedExperts) -> Tensor:
        ctx.layer, ctx.rows, ctx.dtype = layer, expert_rows(ends), x.dtype
        y = x.new_zeros(len(x), layer.out_features)  # rows without an expert stay zero
        for expert, rows in enumerate(ctx.rows):
            if rows.stop > rows.start:
                y[rows] = F.linear(x[rows], layer.matrix(expert).to(x.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        result = grad.new_zeros(len(grad), ctx.layer.in_features)
        for expert, rows in enumerate(ctx.rows):
            if rows.stop > rows.start:
                result[rows] = grad[rows] @ ctx.layer.matrix(expert).to(grad.dtype)
        return result.to(ctx.dtype), None, None


def quantize_linears(model: nn.Module, format: NumberFormat) -> list[str]:
    """Replace linear layers of a model by layers with rounded weights, in place; returns their names.

    The stacked weights of experts are linear layers too. Layers whose shape the format does not allow stay as they are,
    and so do embeddings, norms and adapters. An output layer that shares its matrix with the embedding gets a matrix of
    its own.
    """

    def match(name: str, module: nn.Module) -> bool:
        return can_quantize(name, module, format)

    return replace_modules(model, match, lambda _, module: quantized_layer(module, format))


def quantized_layer(module: nn.Module, format: NumberFormat) -> QuantizedLinear:
    """A layer with the weights of this one, rounded to nearest."""
    if isinstance(module, GroupedLinear):
        return QuantizedExperts.of(module, format)
    assert isinstance(module, nn.Linear)
    return QuantizedLinear.of(module, format)


def dequantize_linears(model: nn.Module) -> list[str]:
    """Replace quantized layers by ordinary ones with the same numbers, in place; returns their names.

    The new layers do not round their inputs, also where the old ones did (W8A8).
    """

    def make(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, QuantizedLinear)
        return module.dequantized()

    return replace_modules(model, lambda _, module: isinstance(module, QuantizedLinear), make)


def can_quantize(name: str, module: nn.Module, format: NumberFormat) -> bool:
    """Whether `quantize_linears` replaces this module of a model."""
    if type(module) not in (nn.Linear, GroupedLinear) or ".lora_" in name:
        return False
    assert isinstance(module, nn.Linear | GroupedLinear)
    try:
        format.check_shape(module.weight.shape[-2:])
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
