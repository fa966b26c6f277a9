"""The bytes of GGUF's block formats: where a block of 32 or 256 numbers has its codes and scales.

A block is a sequence of fields: `scale` and `minimum` are one float16 each, `scales` are small integers, one or two per
group of numbers. The codes are divided into their `low` and `high` bits. Bits are packed in planes: of the numbers that
share a row of bytes, the first ones have the lowest bits of all the bytes, the next ones the bits above them.

    Q4_0: byte i = code[i] | code[i + 16] << 4           a plane has 16 numbers, and a byte has two planes

The layouts are those of ggml, the library of llama.cpp.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BlockType = Literal[
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"
]  # fmt: skip
SCALE_BYTES = {"q2_k": 16, "q3_k": 12, "q4_k": 12, "q5_k": 12, "q6_k": 16, "iq4_xs": 6}


@dataclass(frozen=True)
class Layout:
    """id: of the type in a file. block, group: numbers of a block, and those that share a scale.

    low, high: bits of a code, and numbers of a plane.
    """

    id: int
    block: int
    group: int
    fields: str
    low: tuple[int, int]
    high: tuple[int, int] = (0, 1)

    @property
    def code_bits(self) -> int:
        return self.low[0] + self.high[0]

    @property
    def affine(self) -> bool:
        return "minimum" in self.fields


LAYOUTS: dict[BlockType, Layout] = {
    "q4_0": Layout(2, 32, 32, "scale low", (4, 16)),
    "q4_1": Layout(3, 32, 32, "scale minimum low", (4, 16)),
    "q5_0": Layout(6, 32, 32, "scale high low", (4, 16), (1, 1)),
    "q5_1": Layout(7, 32, 32, "scale minimum high low", (4, 16), (1, 1)),
    "q8_0": Layout(8, 32, 32, "scale low", (8, 1)),
    "q2_k": Layout(10, 256, 16, "scales low scale minimum", (2, 32)),
    "q3_k": Layout(11, 256, 16, "high low scales scale", (2, 32), (1, 32)),
    "q4_k": Layout(12, 256, 32, "scale minimum scales low", (4, 32)),
    "q5_k": Layout(13, 256, 32, "scale minimum scales high low", (4, 32), (1, 32)),
    "q6_k": Layout(14, 256, 16, "low high scales scale", (4, 64), (2, 32)),
    "iq4_nl": Layout(20, 32, 32, "scale low", (4, 16)),
    "iq4_xs": Layout(23, 256, 32, "scale scales low", (4, 16)),
}


def field_bytes(type: BlockType) -> dict[str, int]:
    """The fields of a block in order, with their sizes."""
    layout = LAYOUTS[type]
    codes = {name: layout.block * bits // 8 for name, (bits, _) in (("low", layout.low), ("high", layout.high))}
    sizes = {"scale": 2, "minimum": 2, "scales": SCALE_BYTES.get(type, 0), **codes}
    return {name: sizes[name] for name in layout.fields.split()}


def block_bytes(type: BlockType) -> int:
    return sum(field_bytes(type).values())


def split_fields(blocks: Tensor, type: BlockType) -> dict[str, Tensor]:
    """Blocks (…, bytes) of uint8 -> the bytes of every field."""
    sizes = field_bytes(type)
    return dict(zip(sizes, blocks.split(list(sizes.values()), -1), strict=True))


def join_fields(fields: dict[str, Tensor], type: BlockType) -> Tensor:
    return torch.cat([fields[name] for name in field_bytes(type)], -1)


def pack_planes(codes: Tensor, bits: int, width: int) -> Tensor:
    """Codes (…, n) of uint8 below 2^bits -> bytes (…, n · bits / 8) in planes of `width` numbers."""
    planes = codes.unflatten(-1, (-1, 8 // bits, width)).unbind(-2)
    packed = planes[0]
    for place, plane in enumerate(planes[1:], 1):
        packed = packed | plane << bits * place
    return packed.flatten(-2)


def unpack_planes(packed: Tensor, bits: int, width: int) -> Tensor:
    """The inverse of `pack_planes`."""
    rows, mask = packed.unflatten(-1, (-1, width)), (1 << bits) - 1
    return torch.stack([rows >> bits * place & mask for place in range(8 // bits)], -2).flatten(-3)


def write_codes(codes: Tensor, type: BlockType) -> dict[str, Tensor]:
    """Codes (…, block) as the fields `low` and, if the layout has it, `high`."""
    (bits, width), (high_bits, high_width) = LAYOUTS[type].low, LAYOUTS[type].high
    fields = {"low": pack_planes(codes & (1 << bits) - 1, bits, width)}
    return fields | ({"high": pack_planes(codes >> bits, high_bits, high_width)} if high_bits else {})


def read_codes(fields: dict[str, Tensor], type: BlockType) -> Tensor:
    (bits, width), (high_bits, high_width) = LAYOUTS[type].low, LAYOUTS[type].high
    codes = unpack_planes(fields["low"], bits, width)
    return codes | unpack_planes(fields["high"], high_bits, high_width) << bits if high_bits else codes


def write_float16(numbers: Tensor) -> Tensor:
    """Numbers (…) as bytes (…, 2)."""
    return numbers.to(torch.float16).contiguous().unsqueeze(-1).view(torch.uint8)


def read_float16(field: Tensor) -> Tensor:
    """Bytes (…, 2) as float32 (…)."""
    return field.contiguous().view(torch.float16).squeeze(-1).float()


def write_scales(scales: Tensor, minima: Tensor, type: BlockType) -> Tensor:
    """The integers of every group (…, groups) as the field `scales`; `minima` are stored if the layout is affine."""
    scales, minima = scales.to(torch.int16), minima.to(torch.uint8)
    if type == "q2_k":
        return scales.to(torch.uint8) | minima << 4
    if type == "q6_k":
        return scales.to(torch.int8).view(torch.uint8)
    if type in ("q4_k", "q5_k"):  # four bytes each: the first scales, the first minima, low bits of the other ones
        (scale, later_scale), (minimum, later_minimum) = scales.to(torch.uint8).chunk(2, -1), minima.chunk(2, -1)
        later = later_scale & 15 | (later_minimum & 15) << 4
        return torch.cat([scale | later_scale >> 4 << 6, minimum | later_minimum >> 4 << 6, later], -1)
    unsigned = (scales + 32).to(torch.uint8)
    if type == "q3_k":
        return torch.cat([pack_planes(unsigned & 15, 4, 8), pack_planes(unsigned >> 4, 2, 4)], -1)
    return torch.cat([pack_planes(unsigned >> 4, 2, 1), pack_planes(unsigned & 15, 4, 1)], -1)


def read_scales(field: Tensor, type: BlockType) -> tuple[Tensor, Tensor | None]:
    """The integers of every group, as float32 (…, groups): scales, and minima if the layout is affine."""
    if type == "q2_k":
        return (field & 15).float(), (field >> 4).float()
    if type == "q6_k":
        return field.contiguous().view(torch.int8).float(), None
    if type in ("q4_k", "q5_k"):
        scale, minimum, later = field.chunk(3, -1)
        scales = torch.cat([scale & 63, later & 15 | scale >> 6 << 4], -1)
        return scales.float(), torch.cat([minimum & 63, later >> 4 | minimum >> 6 << 4], -1).float()
    if type == "q3_k":
        low, high = unpack_planes(field[..., :8], 4, 8), unpack_planes(field[..., 8:], 2, 4)
    else:
        high, low = unpack_planes(field[..., :2], 2, 1), unpack_planes(field[..., 2:], 4, 1)
    return (low | high << 4).float() - 32, None
