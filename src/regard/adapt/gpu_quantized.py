"""The products of quantized layers on a GPU, by the kernels of kernels/triton_quantized_linear.py.

    Integer         8 and 4 bits, one scale per output or per group of 32, 64, 128 … inputs
    Float           float8_e4m3fn, likewise

Other formats are expanded in memory for every product.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from regard.compat import HAS_TRITON
from regard.formats.base import NumberFormat, Stored
from regard.formats.floats import Float
from regard.formats.integers import Integer

if TYPE_CHECKING:
    from regard.kernels.triton_quantized_linear import QuantizedWeight

SMALLEST_GROUP = 32


def reads_on_gpu(format: NumberFormat, inputs: int) -> bool:
    if not HAS_TRITON or inputs % SMALLEST_GROUP:
        return False
    if isinstance(format, Float) and format.dtype != "float8_e4m3fn":
        return False
    if isinstance(format, Integer) and (format.bits not in (4, 8) or format.group == "tensor"):
        return False
    if not isinstance(format, Float | Integer):
        return False
    group = inputs if isinstance(format.group, str) else format.group
    return group == inputs or group >= SMALLEST_GROUP and group & (group - 1) == 0


def gpu_weight(format: NumberFormat, stored: Stored) -> "QuantizedWeight":
    """The stored numbers as the kernels read them."""
    from regard.kernels.triton_quantized_linear import QuantizedWeight

    codes, scale, bits = stored["codes"], stored["scale"], format.bits if isinstance(format, Integer) else 8
    scale = scale.unsqueeze(-1) if scale.dim() == 1 else scale  # (outputs, groups)
    return QuantizedWeight(codes, scale, stored.get("zero"), bits, codes.shape[1] * 8 // bits)


def gpu_product(x: Tensor, format: NumberFormat, stored: Stored) -> Tensor:
    """x W'ᵀ"""
    from regard.kernels.triton_quantized_linear import quantized_linear

    codes, scale, zero, bits, _ = gpu_weight(format, stored)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return quantized_linear(rows, codes, scale, zero, bits).view(*x.shape[:-1], len(codes))
