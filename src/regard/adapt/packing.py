"""The weights of quantized layers in the order in which the kernel of a CPU reads them (kernels/packed).

    Integer         8 and 4 bits, one scale per output or per group of a multiple of 32 inputs
    GGUFBlocks      all but IQ4_NL and IQ4_XS

No number changes: `unpack_stored` is the inverse of `pack_stored`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.formats.base import NumberFormat, Stored, pack_bits, unpack_bits
from regard.formats.gguf_blocks import GGUFBlocks
from regard.formats.gguf_layouts import (
    block_bytes,
    join_fields,
    read_codes,
    read_scales,
    split_fields,
    write_codes,
    write_scales,
)
from regard.formats.integers import Integer
from regard.kernels.packed.layouts import BLOCK, LAYOUTS, KernelWeights, PackedLayout, pack, unpack

FACTORS = ("scale", "minimum")  # the fields in float16
GGUF_LAYOUTS = {
    "q8_0": PackedLayout(8, 0, 32, "f16", False),
    "q4_0": PackedLayout(4, 8, 32, "f16", False),
    "q4_1": PackedLayout(4, 0, 32, "f16", True),
    "q5_0": PackedLayout(5, 16, 32, "f16", False),
    "q5_1": PackedLayout(5, 0, 32, "f16", True),
    "q2_k": PackedLayout(2, 0, 16, "k", True),
    "q3_k": PackedLayout(3, 4, 16, "k", False),
    "q4_k": PackedLayout(4, 0, 32, "k", True),
    "q5_k": PackedLayout(5, 0, 32, "k", True),
    "q6_k": PackedLayout(6, 32, 16, "k", False),
}


@dataclass(frozen=True)
class Packing:
    """How the kernel reads a weight of this shape."""

    layout: PackedLayout
    per_header: int
    shape: tuple[int, int]  # (outputs, inputs)

    @property
    def index(self) -> int:
        return LAYOUTS.index(self.layout)


def find_packing(format: NumberFormat, shape: tuple[int, int]) -> Packing | None:
    """None if the kernel cannot read this format."""
    inputs = shape[1]
    if inputs % BLOCK:
        return None
    if isinstance(format, GGUFBlocks) and format.type in GGUF_LAYOUTS:
        layout = GGUF_LAYOUTS[format.type]
        return Packing(layout, 8 if layout.scales == "k" else 1, shape)
    if isinstance(format, Integer) and format.bits in (4, 8):
        group = inputs if isinstance(format.group, str) else format.group
        zero = 8 if format.symmetric and format.bits == 4 else 0
        header = "f16_header" if format.scale_dtype == "float16" else "f32_header"
        layout = PackedLayout(format.bits, zero, 32, header, not format.symmetric)
        return None if group % BLOCK else Packing(layout, group // BLOCK, shape)
    return None


def pack_stored(format: NumberFormat, stored: Stored, packing: Packing) -> Tensor:
    read = read_blocks if isinstance(format, GGUFBlocks) else read_integers
    return pack(read(format, stored, packing), packing.layout, packing.per_header)  # ty: ignore[invalid-argument-type]


def unpack_stored(format: NumberFormat, packed: Tensor, packing: Packing) -> dict[str, Tensor]:
    write = write_blocks if isinstance(format, GGUFBlocks) else write_integers
    weights = unpack(packed, packing.layout, packing.per_header, *packing.shape)
    return write(format, weights)  # ty: ignore[invalid-argument-type]


def read_integers(format: Integer, stored: Stored, packing: Packing) -> KernelWeights:
    """Codes of eight bits become signed, and so do their zero points."""
    codes, sign = unpack_bits(stored["codes"], format.bits), 128 if format.bits == 8 else 0
    scale = stored["scale"].to(packing.layout.header[0]).expand(packing.shape[0], -1)
    codes = (codes ^ sign).view(torch.int8) if sign else codes
    if format.symmetric:
        return KernelWeights(codes, (scale,))
    zero = (stored["zero"] ^ sign).view(torch.int8).expand(packing.shape[0], -1)
    return KernelWeights(codes, (scale, zero))


def write_integers(format: Integer, weights: KernelWeights) -> dict[str, Tensor]:
    sign, rows = 128 if format.bits == 8 else 0, slice(1) if format.group == "tensor" else slice(None)
    codes, (scale, *zero) = weights.codes.view(torch.uint8) ^ sign, weights.header
    stored = {
        "codes": pack_bits(codes, format.bits),
        "scale": scale[rows].to(getattr(torch, format.scale_dtype)).contiguous(),
    }
    if zero:
        stored["zero"] = zero[0][rows].contiguous().view(torch.uint8) ^ sign
    return stored


def read_blocks(format: GGUFBlocks, stored: Stored, packing: Packing) -> KernelWeights:
    fields = split_fields(stored["blocks"].unflatten(-1, (-1, block_bytes(format.type))), format.type)
    codes = read_codes(fields, format.type).flatten(1)
    codes = codes.view(torch.int8) if format.type == "q8_0" else codes
    halves = [fields[name].contiguous().view(torch.float16).squeeze(-1) for name in FACTORS if name in fields]
    if "scales" not in fields:
        return KernelWeights(codes, (), tuple(halves))
    integers = [array for array in read_scales(fields["scales"], format.type) if array is not None]
    scales = tuple(array.to(torch.int8).flatten(1) for array in integers)
    factor, *minimum = halves
    return KernelWeights(codes, (factor, *(-array for array in minimum)), scales)  # W = d s Q - e t


def write_blocks(format: GGUFBlocks, weights: KernelWeights) -> dict[str, Tensor]:
    def by_block(array: Tensor) -> Tensor:
        return array.unflatten(-1, (-1, array.shape[-1] * format.layout.block // weights.codes.shape[-1]))

    fields = write_codes(by_block(weights.codes.view(torch.uint8)), format.type)
    halves = weights.scales
    if weights.header:
        scale, *minimum = (by_block(array) for array in weights.scales)
        fields["scales"] = write_scales(scale, minimum[0] if minimum else torch.zeros_like(scale), format.type)
        factor, *minimum = weights.header
        halves = (factor, *(-array for array in minimum))
    for name, array in zip(FACTORS, halves, strict=False):
        fields[name] = array.contiguous().unsqueeze(-1).view(torch.uint8)
    return {"blocks": join_fields(fields, format.type).flatten(1)}
