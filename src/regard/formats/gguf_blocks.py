"""GGUF's block formats: the weights of llama.cpp's files, byte by byte.

    Q4_0, Q5_0, Q8_0    W ≈ d (Q - 2^(b-1))            d: a float16 per 32 weights
    Q4_1, Q5_1          W ≈ d Q + m                    and a float16 minimum m
    Q3_K, Q6_K          W ≈ d s (Q - 2^(b-1))          s: an integer per 16 weights, d: a float16 per 256
    Q2_K, Q4_K, Q5_K    W ≈ d s Q - e t                s, t: integers per 16 or 32 weights, d, e: float16 per 256
    IQ4_NL, IQ4_XS      W ≈ d c[Q], W ≈ d s c[Q]       c: sixteen levels that are denser near zero

They take 2.6 to 8.5 bits per weight. The codes of the first two rows equal those of the `gguf` library. The scales of
the other ones are searched for the smallest squared error (gguf_search.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.formats.base import NumberFormat, Stored, require_finite
from regard.formats.gguf_layouts import (
    LAYOUTS,
    BlockType,
    Layout,
    block_bytes,
    join_fields,
    read_codes,
    read_float16,
    read_scales,
    split_fields,
    write_codes,
    write_float16,
    write_scales,
)  # fmt: skip
from regard.formats.gguf_search import Fitted, Levels, fit_block, fit_group
from regard.spec import require

HALF = torch.finfo(torch.float16)
SEARCH_NUMEL = 1 << 17  # numbers that are searched at a time, so that they stay in the cache
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class GGUFBlocks(NumberFormat):
    type: BlockType = "q4_k"

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.type]

    @property
    def levels(self) -> Levels:
        """The numbers that the codes stand for, before their scale."""
        if self.type.startswith("iq4"):
            return Levels(IQ4_LEVELS)
        lowest = 0 if self.layout.affine else -(1 << self.layout.code_bits - 1)
        return Levels(range(lowest, lowest + (1 << self.layout.code_bits)))

    def check_shape(self, shape: Sequence[int]) -> None:
        require(
            shape[-1] % self.layout.block == 0,
            f"{self.type}: {shape[-1]} inputs are no multiple of its block of {self.layout.block}; use another format",
        )

    def stored_like(self, shape: Sequence[int]) -> dict[str, Tensor]:
        row_bytes = shape[-1] // self.layout.block * block_bytes(self.type)
        return {"blocks": torch.empty(*shape[:-1], row_bytes, dtype=torch.uint8, device="meta")}

    def group_size(self, inputs: int) -> int:
        return self.layout.group

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_shape(weight.shape)
        blocks = require_finite(weight).float().reshape(-1, self.layout.block)
        encode = self.round_to_nearest if "_k" not in self.type and "iq4" not in self.type else self.search
        encoded = torch.cat([encode(part) for part in blocks.split(SEARCH_NUMEL // self.layout.block)])
        return {"blocks": encoded.view(*weight.shape[:-1], -1)}

    def round_to_nearest(self, x: Tensor) -> Tensor:
        """Blocks (n, 32) -> bytes. The scales are rounded to float16 after the codes are computed, as in ggml."""
        count, fields = 1 << self.layout.code_bits, {}
        if self.layout.affine:
            low, high = x.aminmax(dim=-1, keepdim=True)
            scale, start = (high - low) / (count - 1), low
            fields["minimum"] = self.float16_field(low)
        else:  # the largest number gets the lowest code; of eight bits both ends are symmetric
            largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
            scale = largest.abs() / 127 if self.type == "q8_0" else largest / -(count // 2)
            start = torch.zeros_like(scale)
        steps = (x - start) * torch.where(scale == 0, 0, 1 / scale)
        if self.type == "q8_0":
            codes = (steps.abs() + 0.5).floor().copysign(steps).to(torch.int8).view(torch.uint8)
        else:
            zero = 0 if self.layout.affine else count // 2
            codes = (steps + (zero + 0.5)).trunc().clamp(0, count - 1).to(torch.uint8)
        return join_fields(fields | {"scale": self.float16_field(scale)} | write_codes(codes, self.type), self.type)

    def search(self, x: Tensor) -> Tensor:
        """Blocks (n, block) -> bytes with the scales, and the minima, of the smallest squared error."""
        groups = x.view(-1, self.layout.group).t().contiguous()  # (group, n · groups): sums over the first are fast
        if self.type == "iq4_nl":
            fitted = fit_group(groups, self.levels)
        else:
            limit = {"q2_k": 15, "q3_k": 31, "q6_k": 127, "iq4_xs": 31}.get(self.type, 63)
            fitted = fit_block(groups, self.levels, self.layout.block // self.layout.group, limit, self.layout.affine)
        return self.written(fitted, len(x))

    def written(self, fitted: Fitted, blocks: int) -> Tensor:
        fields = {"scale": self.float16_field(fitted.scale.view(blocks, 1))}
        if fitted.minimum is not None:
            fields["minimum"] = self.float16_field(fitted.minimum.view(blocks, 1))
        if fitted.scales is not None:
            minima = torch.zeros_like(fitted.scales) if fitted.minima is None else fitted.minima
            fields["scales"] = write_scales(fitted.scales.view(blocks, -1), minima.view(blocks, -1), self.type)
        codes = fitted.codes.t().reshape(blocks, self.layout.block)
        return join_fields(fields | write_codes(codes, self.type), self.type)

    def float16_field(self, numbers: Tensor) -> Tensor:
        """Numbers (n, 1) as bytes (n, 2)."""
        require(
            bool((numbers.abs() <= HALF.max).all()),
            f"{self.type}: a block needs a scale above {HALF.max:g}, the largest float16; use bfloat16 or float32",
        )
        return write_float16(numbers.squeeze(-1))

    def dequantize(self, stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
        blocks = stored["blocks"].unflatten(-1, (-1, block_bytes(self.type)))
        fields = split_fields(blocks, self.type)
        scale, minimum = self.scales(fields)
        codes = read_codes(fields, self.type).unflatten(-1, (-1, self.layout.group))
        if self.type == "q8_0":
            values = codes.view(torch.int8).float()
        elif self.type.startswith("iq4"):
            values = self.levels.numbers.to(codes.device)[codes.int()]
        else:
            values = codes.float()
            values = values if self.layout.affine else values - (1 << self.layout.code_bits - 1)
        numbers = values * scale.unsqueeze(-1)
        numbers = numbers if minimum is None else numbers + minimum.unsqueeze(-1)
        return numbers.flatten(-3).to(dtype)

    def scales(self, fields: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The scale and the minimum of every group (…, groups)."""
        scale = read_float16(fields["scale"]).unsqueeze(-1)
        minimum = read_float16(fields["minimum"]).unsqueeze(-1) if self.layout.affine else None
        if "scales" not in fields:
            return scale, minimum
        scales, minima = read_scales(fields["scales"], self.type)
        return scale * scales, None if minimum is None or minima is None else -(minimum * minima)

    def error_bound(self, stored: Stored) -> Tensor:
        """Half a step, or a whole one where the last level is on one side of zero only or the range is searched; and
        the rounding of scales: to float16, or to half an integer."""
        fields = split_fields(stored["blocks"].unflatten(-1, (-1, block_bytes(self.type))), self.type)
        scale, minimum = self.scales(fields)
        levels = self.levels
        step = scale.abs() * (0.5 if self.type in ("q4_1", "q5_1", "q8_0") else levels.step)
        if "scales" in fields:
            unit = read_float16(fields["scale"]).abs().unsqueeze(-1)
            slack = (levels.largest + levels.step) / 2 * unit
            slack = slack + (read_float16(fields["minimum"]).abs().unsqueeze(-1) / 2 if self.layout.affine else 0)
        else:
            slack = levels.largest * half_rounding(scale)
            slack = slack if minimum is None else slack + half_rounding(minimum)
        return (step + slack).repeat_interleave(self.layout.group, -1).flatten(-2)


def half_rounding(numbers: Tensor) -> Tensor:
    """The largest error of numbers that were rounded to float16."""
    return HALF.eps / 2 * (1 + HALF.eps) * numbers.abs() + HALF.smallest_normal * HALF.eps / 2
