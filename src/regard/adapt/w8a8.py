"""Linear layers with weights and inputs of eight bits (W8A8): the product is one of integers, and exact.

    y = s_x s_W ⊙ (Q_x Q_Wᵀ) + b        Q_x = round(x / s_x), s_x = max |x| / 127: one scale per token

Weights are integers of eight bits with one scale per output, without zero points. Inputs are rounded when they arrive
("dynamic"), so nothing is calibrated; SmoothQuant makes their outliers smaller before (quantization/scaling.py).
Dettmers et al. 2022 (arXiv:2208.07339), Xiao et al. 2022 (arXiv:2211.10438).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.adapt.quantized import QuantizedLinear
from regard.formats.base import NumberFormat
from regard.formats.integers import Integer
from regard.spec import require

CUDA_ROWS, CUDA_MULTIPLE = 32, 8  # what CUDA's product of integers needs


class W8A8Linear(QuantizedLinear):
    can_pack = False  # the kernel for packed weights rounds inputs in another way

    def forward(self, x: Tensor) -> Tensor:
        y = IntegerProduct.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def integers(self) -> Tensor:
        """Q_W (outputs, inputs), from -127 to 127; the codes are 128 larger."""
        return (self.get_buffer("codes") ^ 128).view(torch.int8)


def check_w8a8(format: NumberFormat) -> None:
    """Raise SpecError if products with weights of this format cannot be those of integers."""
    allowed = isinstance(format, Integer) and format.bits == 8 and format.symmetric and isinstance(format.group, str)
    require(allowed, f"inputs of eight bits need weights in int8, symmetric, without groups; the format is {format}")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (n, inputs) -> integers, and the scale (n, 1) of every row."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (x / scale).round().to(torch.int8), scale


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a (n, k) and b (m, k) of int8 -> a bᵀ (n, m) of int32, exact."""
    if a.device.type != "cuda":
        return torch._int_mm(a, b.t())
    if b.shape[0] % CUDA_MULTIPLE or b.shape[1] % CUDA_MULTIPLE:
        return (a.double() @ b.double().t()).to(torch.int32)  # sums of integers below 2^53 are exact
    padded = F.pad(a, (0, 0, 0, max(0, CUDA_ROWS - len(a))))
    return torch._int_mm(padded, b.t())[: len(a)]


class IntegerProduct(torch.autograd.Function):
    """The product, with the gradient of x as if it were not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: W8A8Linear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        rows, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        scales = scale * layer.get_buffer("scale").to(scale.dtype).view(1, -1)  # (n, outputs)
        y = integer_product(rows, layer.integers).to(scale.dtype) * scales
        return y.to(x.dtype).view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return (grad @ ctx.layer.weight.to(grad.dtype)).to(ctx.dtype), None
