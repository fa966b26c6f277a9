"""NF4: sixteen levels at quantiles of a normal distribution, which weights resemble. Dettmers et al. 2023 (QLoRA).

    W ≈ s c[Q]        s = max |W| of a block of 64 weights, c: sixteen levels from -1 to 1 with 0 among them

With double quantization the scales are stored in eight bits: less their mean, in blocks of 256, by the levels of a
"dynamic tree" (Dettmers 2016), whose step grows with the number. That leaves 4.127 bits per weight instead of 4.5.

Blocks run through the whole weight, output by output. A number in the middle of two levels gets the lower one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from regard.formats.base import NumberFormat, Stored, pack_bits, packed_like, require_finite, unpack_bits
from regard.spec import require

LEVELS = (  # as published; quantiles of a normal distribution, computed in float32
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
SCALE_BLOCK = 256  # scales that share a scale in double quantization


@cache
def normal_levels() -> Tensor:
    """The levels (16,): eight positive and seven negative ones, and 0."""
    return torch.tensor(LEVELS)


@cache
def dynamic_levels() -> Tensor:
    """The levels (256,) of a dynamic tree: for each power of ten from 10⁻⁶ to 1, twice as many as for the one below.

    Of a power there are 2^i levels in the middle of equal parts of the range from a tenth of it to itself.
    """
    levels = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1)
        middles = 10.0 ** (i - 6) * (bounds[:-1] + bounds[1:]) / 2
        levels += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(levels))


def nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """The index of the nearest level."""
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(values, middles.to(values.device), out_int32=True).to(torch.uint8)


@dataclass(frozen=True)
class NF4(NumberFormat):
    block: int = 64
    double: bool = True  # store the scales in eight bits

    def check(self) -> None:
        require(self.block > 0 and self.block % 2 == 0, f"nf4: block={self.block} must be positive and even")

    def check_shape(self, shape: Sequence[int]) -> None:
        count = math.prod(shape)
        require(
            count % self.block == 0 and shape[-1] % 2 == 0,
            f"nf4: the {count} numbers of a weight {tuple(shape)} are no whole blocks of {self.block}; use another",
        )

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_shape(weight.shape)
        blocks = require_finite(weight).float().reshape(-1, self.block)
        scale = blocks.abs().amax(-1)
        normalized = blocks / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        codes = nearest_level(normalized, normal_levels())
        stored = {"codes": pack_bits(codes.view(weight.shape), 4)}
        return stored | (quantize_scales(scale) if self.double else {"scale": scale})

    def dequantize(self, stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = unpack_bits(stored["codes"], 4)
        values = normal_levels().to(codes.device)[codes.int()].view(-1, self.block)
        return (values * self.scales(stored).unsqueeze(-1)).view(codes.shape).to(dtype)

    def scales(self, stored: Stored) -> Tensor:
        """The scale of every block."""
        return dequantize_scales(stored) if self.double else stored["scale"]

    def error_bound(self, stored: Stored) -> Tensor:
        """Half of the largest distance of two levels, and the error of the scale where the level is 1."""
        levels, scales = normal_levels(), self.scales(stored)
        error = scale_error(stored) if self.double else torch.zeros_like(scales)
        bound = (levels[1:] - levels[:-1]).max() / 2 * (scales + error) + error
        shape = (*stored["codes"].shape[:-1], 2 * stored["codes"].shape[-1])
        return bound.repeat_interleave(self.block).view(shape)

    def stored_like(self, shape: Sequence[int]) -> dict[str, Tensor]:
        blocks = math.prod(shape) // self.block
        if not self.double:
            return {"codes": packed_like(shape, 4), "scale": torch.empty(blocks, device="meta")}
        return {
            "codes": packed_like(shape, 4),
            "scale": torch.empty(blocks, dtype=torch.uint8, device="meta"),
            "scale_scale": torch.empty(-(-blocks // SCALE_BLOCK), device="meta"),
            "scale_mean": torch.empty(1, device="meta"),
        }

    def group_size(self, inputs: int) -> int:
        return self.block if inputs % self.block == 0 else inputs

    def requantize(self, weight: Tensor, stored: Stored) -> dict[str, Tensor]:
        scales = self.scales(stored).repeat_interleave(self.block).view(weight.shape)
        return {**stored, "codes": pack_bits(self.encode(require_finite(weight), {"scale": scales}), 4)}

    def grid(self, stored: Stored) -> dict[str, Tensor]:
        shape = (*stored["codes"].shape[:-1], 2 * stored["codes"].shape[-1])
        return {"scale": self.scales(stored).repeat_interleave(self.block).view(shape)}

    def nearest(self, values: Tensor, grid: Stored) -> Tensor:
        levels = normal_levels().to(values.device)[self.encode(values, grid).int()]
        return (levels * grid["scale"]).to(values.dtype)  # in float32, as `dequantize`

    def encode(self, values: Tensor, grid: Stored) -> Tensor:
        normalized = values.float() / grid["scale"].clamp_min(torch.finfo(torch.float32).tiny)
        return nearest_level(normalized, normal_levels())


def quantize_scales(scale: Tensor) -> dict[str, Tensor]:
    """Scales (n,) as `scale` of one byte each, `scale_scale` of every 256, and `scale_mean`."""
    mean = scale.mean()
    blocks = padded_blocks(scale - mean)
    largest = blocks.abs().amax(-1)
    normalized = blocks / largest.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = nearest_level(normalized, dynamic_levels()).flatten()[: len(scale)]
    return {"scale": codes, "scale_scale": largest, "scale_mean": mean.view(1)}


def dequantize_scales(stored: Stored) -> Tensor:
    codes = stored["scale"]
    values = padded_blocks(dynamic_levels().to(codes.device)[codes.int()]) * stored["scale_scale"].unsqueeze(-1)
    return values.flatten()[: len(codes)] + stored["scale_mean"]


def scale_error(stored: Stored) -> Tensor:
    """The largest error of every scale: half of the largest distance of two dynamic levels."""
    levels = dynamic_levels()
    largest = (levels[1:] - levels[:-1]).max() / 2 * stored["scale_scale"]
    return largest.repeat_interleave(SCALE_BLOCK)[: len(stored["scale"])]


def padded_blocks(values: Tensor) -> Tensor:
    """Values (n,) in rows of 256, the last one filled with zeros."""
    rows = -(-len(values) // SCALE_BLOCK)
    return torch.nn.functional.pad(values, (0, rows * SCALE_BLOCK - len(values))).view(rows, SCALE_BLOCK)
