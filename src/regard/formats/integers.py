"""Integers of few bits, with a scale for every group of weights.

    symmetric     W ≈ s (Q - 2^(b-1))      s = max |W| / (2^(b-1) - 1)
    asymmetric    W ≈ s (Q - z)            s = (max W - min W) / (2^b - 1),  z = round(-min W / s),  both ranges with 0

Q are codes from 0 to 2^b - 1. Symmetric, the largest weight is exact, and code 0 is not used. An asymmetric range is
shifted by up to half a step, because z is an integer, so that 0 is exact.
Jacob et al. 2018 (arXiv:1712.05877).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.formats.base import NumberFormat, Stored, pack_bits, packed_like, require_finite, unpack_bits
from regard.spec import require

Group = int | Literal["channel", "tensor"]


@dataclass(frozen=True)
class Integer(NumberFormat):
    bits: int = 8
    symmetric: bool = True
    group: Group = "channel"  # inputs that share a scale: a number, all of an output, or those of all outputs
    scale_dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    def check(self) -> None:
        require(2 <= self.bits <= 8, f"integer: bits={self.bits} must be from 2 to 8")
        require(isinstance(self.group, str) or self.group > 0, f"integer: group={self.group} must be positive")

    @property
    def levels(self) -> int:
        return 1 << self.bits

    def check_shape(self, shape: Sequence[int]) -> None:
        inputs = shape[-1]
        size = self.group_size(inputs)
        require(inputs % size == 0, f"integer: group={size} does not divide the {inputs} inputs; choose a divisor")
        require(
            inputs * self.bits % 8 == 0,
            f"integer: {inputs} inputs of {self.bits} bits do not fill whole bytes; use 8 bits, or another format",
        )

    def grouped(self, weight: Tensor) -> Tensor:
        """The weight, or its codes, with the weights of a group in the last dimension."""
        if self.group == "tensor":
            return weight.flatten(-2).unsqueeze(-2).unsqueeze(-2)  # (…, 1, 1, outputs · inputs)
        return weight.unflatten(-1, (-1, self.group_size(weight.shape[-1])))  # (…, outputs, groups, size)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_shape(weight.shape)
        return self.quantize_values(require_finite(weight))

    def quantize_values(self, values: Tensor) -> dict[str, Tensor]:
        groups = self.grouped(values)
        if self.symmetric:
            scale = self.rounded_scale(groups.abs().amax(-1) / (self.levels / 2 - 1))
            return self.with_codes(values, {"scale": scale})
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scale = self.rounded_scale((high - low) / (self.levels - 1))
        return self.with_codes(values, {"scale": scale, "zero": (-low / scale).round().to(torch.uint8)})

    def requantize(self, weight: Tensor, stored: Stored) -> dict[str, Tensor]:
        return self.with_codes(require_finite(weight), stored)

    def with_codes(self, values: Tensor, stored: Stored) -> dict[str, Tensor]:
        grid = {name: stored[name].unsqueeze(-1) for name in ("scale", "zero") if name in stored}
        codes = self.encode(self.grouped(values), grid)
        return {**stored, "codes": pack_bits(codes.to(torch.uint8).view(values.shape), self.bits)}

    def encode(self, values: Tensor, grid: Stored) -> Tensor:
        """The codes as floats, for scales and zero points that broadcast to the values."""
        codes = (values / grid["scale"].to(values.dtype)).round() + grid.get("zero", self.levels // 2)
        return codes.clamp(0, self.levels - 1)

    def grid(self, stored: Stored) -> dict[str, Tensor]:
        outputs, inputs = stored["codes"].shape[-2], stored["codes"].shape[-1] * 8 // self.bits
        return {name: self.per_weight(stored[name], outputs, inputs) for name in ("scale", "zero") if name in stored}

    def nearest(self, values: Tensor, grid: Stored) -> Tensor:
        steps = self.encode(values, grid) - grid.get("zero", self.levels // 2)
        return steps * grid["scale"].to(values.dtype)

    def per_weight(self, values: Tensor, outputs: int, inputs: int) -> Tensor:
        """Values of groups (…, outputs or 1, groups) for every weight of the group: (…, outputs, inputs)."""
        size = inputs if self.group == "tensor" else self.group_size(inputs)
        return values.repeat_interleave(size, -1).expand(*values.shape[:-2], outputs, inputs)

    def rounded_scale(self, scale: Tensor) -> Tensor:
        """In the dtype of scales; rounded up, so that the levels still cover all weights of the group."""
        dtype = getattr(torch, self.scale_dtype)
        info = torch.finfo(dtype)
        scale = scale.clamp_min(info.tiny)  # a group of zeros
        return scale.to(dtype) if dtype == torch.float32 else (scale * (1 + info.eps)).to(dtype)

    def dequantize(self, stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = unpack_bits(stored["codes"], self.bits)
        zero = self.levels / 2 if self.symmetric else stored["zero"].to(dtype).unsqueeze(-1)
        values = self.grouped(codes).to(dtype) - zero
        return (values * stored["scale"].to(dtype).unsqueeze(-1)).view(codes.shape)

    def error_bound(self, stored: Stored) -> Tensor:
        """Half a step; a whole one with a zero point, which can shift the ends of the range by half a step."""
        step = stored["scale"].float() * (0.5 if self.symmetric else 1.0)
        outputs, inputs = stored["codes"].shape[-2], stored["codes"].shape[-1] * 8 // self.bits
        return self.per_weight(step, outputs, inputs)

    def stored_like(self, shape: Sequence[int]) -> dict[str, Tensor]:
        *stack, outputs, inputs = shape
        groups = (1, 1) if self.group == "tensor" else (outputs, inputs // self.group_size(inputs))
        scale = torch.empty(*stack, *groups, dtype=getattr(torch, self.scale_dtype), device="meta")
        stored = {"codes": packed_like(shape, self.bits), "scale": scale}
        return (
            stored if self.symmetric else stored | {"zero": torch.empty(scale.shape, dtype=torch.uint8, device="meta")}
        )

    def group_size(self, inputs: int) -> int:
        return inputs if isinstance(self.group, str) else self.group
