"""A number format: what is stored in place of a weight, and the weight that is read from it again.

    stored = format.quantize(W)         tensors by name: codes of few bits, and the scales of groups of weights
    W' = format.dequantize(stored)      |W - W'| ≤ format.error_bound(stored)

Weights have the shape (…, outputs, inputs). A group are consecutive inputs of one output that share a scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.spec import Spec, SpecError, require

Stored = Mapping[str, Tensor]


@dataclass(frozen=True)
class NumberFormat(Spec):
    kind_table: ClassVar[str] = "formats"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise SpecError if a weight of this shape cannot be stored in this format."""

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def quantize_values(self, values: Tensor) -> dict[str, Tensor]:
        """`quantize` without checks, which would wait for a GPU, of values in at least float32."""
        raise SpecError(f"{self.kind}: only weights are stored in this format; use integer or float")

    def dequantize(self, stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
        raise NotImplementedError

    def error_bound(self, stored: Stored) -> Tensor:
        """The largest |W - W'| that rounding can cause; its shape broadcasts to that of W."""
        raise NotImplementedError

    def stored_like(self, shape: Sequence[int]) -> dict[str, Tensor]:
        """Tensors on the meta device with the names, shapes and dtypes of those that store a weight of this shape."""
        return {name: tensor.to("meta") for name, tensor in self.quantize(torch.zeros(*shape)).items()}

    def bytes(self, shape: Sequence[int]) -> int:
        """Of the stored tensors of a weight."""
        self.check_shape(shape)
        return sum(tensor.nbytes for tensor in self.stored_like(shape).values())

    def group_size(self, inputs: int) -> int:
        """The number of consecutive inputs that share a scale."""
        return inputs

    def requantize(self, weight: Tensor, stored: Stored) -> dict[str, Tensor]:
        """The weight with the scales that are stored already, each number rounded to the nearest code."""
        raise SpecError(f"{self.kind}: codes cannot be chosen for given scales; use integer, nf4 or float")

    def grid(self, stored: Stored) -> dict[str, Tensor]:
        """The scale of every weight, and its zero point if the format has them: tensors of the weight's shape."""
        raise SpecError(f"{self.kind}: codes cannot be chosen for given scales; use integer, nf4 or float")

    def nearest(self, values: Tensor, grid: Stored) -> Tensor:
        """The numbers of the format that are nearest to the values, for scales of the same shape."""
        raise SpecError(f"{self.kind}: codes cannot be chosen for given scales; use integer, nf4 or float")


def require_finite(weight: Tensor) -> Tensor:
    """The weight in at least float32."""
    require(bool(weight.isfinite().all()), "a weight has values that are not finite; it cannot be quantized")
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes (…, n) of uint8 below 2^bits -> bytes (…, n · bits / 8): one code after the other, lowest bits first."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[..., 0::2] | codes[..., 1::2] << 4
    single = (codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    octets = single.flatten(-2).unflatten(-1, (-1, 8))
    return (octets << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_bits`."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    single = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    groups = single.flatten(-2).unflatten(-1, (-1, bits))
    return (groups << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(-1, dtype=torch.uint8)


def packed_like(shape: Sequence[int], bits: int) -> Tensor:
    """A tensor on the meta device like the packed codes of a weight of this shape."""
    return torch.empty(*shape[:-1], shape[-1] * bits // 8, dtype=torch.uint8, device="meta")
