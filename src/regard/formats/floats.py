"""Floating-point numbers of 16 and 8 bits.

    float16          5 bits of exponent, 10 of fraction: up to 65,504
    bfloat16         8 and 7: the range of float32
    float8_e4m3fn    4 and 3: up to 448, no infinity
    float8_e5m2      5 and 2: up to 57,344

Eight bits have a scale per output or per group of its inputs, so that the largest weight becomes the largest number:
W ≈ s Q, s = max |W| / max Q. Micikevicius et al. 2022 (arXiv:2209.05433).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.formats.base import NumberFormat, Stored, require_finite
from regard.spec import require


@dataclass(frozen=True)
class Float(NumberFormat):
    dtype: Literal["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = "bfloat16"
    group: int | Literal["channel"] = "channel"  # inputs that share a scale: a number, or all of an output

    def check(self) -> None:
        require(self.group == "channel" or self.group > 0, f"float: group={self.group} must be positive")
        require(
            self.scaled or self.group == "channel", f"float: {self.dtype} has no scales; leave out group={self.group}"
        )

    def check_shape(self, shape: Sequence[int]) -> None:
        size = self.group_size(shape[-1])
        require(shape[-1] % size == 0, f"float: group={size} does not divide the {shape[-1]} inputs; choose a divisor")

    def group_size(self, inputs: int) -> int:
        return inputs if isinstance(self.group, str) else self.group

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def scaled(self) -> bool:
        return self.torch_dtype.itemsize == 1

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_shape(weight.shape)
        weight, info = require_finite(weight), torch.finfo(self.torch_dtype)
        if not self.scaled:
            require(
                bool(weight.abs().amax() <= info.max),
                f"float: a weight is larger than {info.max:g}, the largest {self.dtype}; use bfloat16",
            )
        return self.quantize_values(weight)

    def quantize_values(self, values: Tensor) -> dict[str, Tensor]:
        if not self.scaled:
            return {"codes": values.to(self.torch_dtype)}
        info = torch.finfo(self.torch_dtype)
        largest = values.abs() if self.group == "channel" else values.abs().unflatten(-1, (-1, self.group))
        scale = (largest.amax(-1).float() / info.max).clamp_min(torch.finfo(torch.float32).tiny)
        return {"codes": self.encode(values, {"scale": self.per_weight(scale)}), "scale": scale}

    def per_weight(self, scale: Tensor) -> Tensor:
        """The scales of groups, or of outputs, in a shape that broadcasts to that of the weight."""
        return scale.unsqueeze(-1) if isinstance(self.group, str) else scale.repeat_interleave(self.group, -1)

    def dequantize(self, stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
        values = stored["codes"].to(dtype)
        return values * self.per_weight(stored["scale"].to(dtype)) if self.scaled else values

    def error_bound(self, stored: Stored) -> Tensor:
        """Half of the distance to the next number; that of the smallest numbers is constant."""
        info, values = torch.finfo(self.torch_dtype), stored["codes"].float().abs()
        bound = info.eps / 2 * torch.clamp_min(values, info.tiny) * (1 + info.eps)  # W may be above its rounded value
        return bound * self.per_weight(stored["scale"]) if self.scaled else bound

    def stored_like(self, shape: Sequence[int]) -> dict[str, Tensor]:
        codes = torch.empty(*shape, dtype=self.torch_dtype, device="meta")
        groups = () if isinstance(self.group, str) else (shape[-1] // self.group,)
        return {"codes": codes} | ({"scale": torch.empty(*shape[:-1], *groups, device="meta")} if self.scaled else {})

    def requantize(self, weight: Tensor, stored: Stored) -> dict[str, Tensor]:
        return {**stored, "codes": self.encode(require_finite(weight), self.grid(stored))}

    def grid(self, stored: Stored) -> dict[str, Tensor]:
        return {"scale": self.per_weight(stored["scale"]).expand(stored["codes"].shape)} if self.scaled else {}

    def nearest(self, values: Tensor, grid: Stored) -> Tensor:
        codes = self.encode(values, grid).to(values.dtype)
        return codes * grid["scale"] if self.scaled else codes

    def encode(self, values: Tensor, grid: Stored) -> Tensor:
        if not self.scaled:
            return values.to(self.torch_dtype)
        largest = torch.finfo(self.torch_dtype).max
        scaled = (values / grid["scale"]).clamp(-largest, largest)  # a quotient can round to above the largest
        return scaled.to(self.torch_dtype)
