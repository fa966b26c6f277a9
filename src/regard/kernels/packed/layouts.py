"""The layouts in which packed_linear.cpp reads weights: the codes and scales of a number format in another order.

    W' = s (q - z) + m        for 16, 32 or more inputs of one output: scale s, zero point z, minimum m

A tile has the codes of eight outputs. It is stored in blocks of 32 inputs, so that a product reads memory in order:

    header, every `per_header` blocks      "f32_header", "f16_header": s, and z if it is no constant
                                           "k": factors in float16, one of the scales and one of the minima
    scales, per block                      "f16": s and m in float16;   "k": integers, multiplied by the factors
    codes, per block                       planes of 4, 2 and 1 bits; codes of eight bits are signed

A plane holds chunks of four inputs: 32 codes, output by output. Four bits: two chunks per 32 bytes, the even one in the
low bits; two bits: four chunks; one bit: all eight.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE, BLOCK = 8, 32


@dataclass(frozen=True)
class PackedLayout:
    bits: int
    zero: int  # z if it is a constant
    group: Literal[16, 32]  # inputs with scales of their own inside of a block
    scales: Literal["f32_header", "f16_header", "f16", "k"]
    second: bool  # whether there are zero points (of headers) or minima beside the scales

    @property
    def planes(self) -> tuple[int, ...]:
        return (8,) if self.bits == 8 else tuple(plane for plane in (4, 2, 1) if self.bits & plane)

    @property
    def header(self) -> tuple[torch.dtype, ...]:
        """Of the arrays in a header, eight numbers each."""
        first = {"f32_header": torch.float32, "f16_header": torch.float16, "k": torch.float16}.get(self.scales)
        if first is None:
            return ()
        return (first, first if self.scales == "k" else torch.int8) if self.second else (first,)

    @property
    def block_scales(self) -> tuple[torch.dtype, ...]:
        """Of the arrays per group."""
        dtype = {"f16": torch.float16, "k": torch.int8}.get(self.scales)
        return () if dtype is None else (dtype, dtype) if self.second else (dtype,)


LAYOUTS = (  # in the order of packed_linear.cpp
    *(
        PackedLayout(bits, 8 if bits == 4 and not second else 0, 32, scales, second)
        for scales in ("f32_header", "f16_header")
        for bits in (8, 4)
        for second in (False, True)
    ),
    PackedLayout(8, 0, 32, "f16", False),  # Q8_0
    PackedLayout(4, 8, 32, "f16", False),  # Q4_0
    PackedLayout(4, 0, 32, "f16", True),  # Q4_1
    PackedLayout(5, 16, 32, "f16", False),  # Q5_0
    PackedLayout(5, 0, 32, "f16", True),  # Q5_1
    PackedLayout(2, 0, 16, "k", True),  # Q2_K
    PackedLayout(3, 4, 16, "k", False),  # Q3_K
    PackedLayout(4, 0, 32, "k", True),  # Q4_K
    PackedLayout(5, 0, 32, "k", True),  # Q5_K
    PackedLayout(6, 32, 16, "k", False),  # Q6_K
)


@dataclass(frozen=True)
class KernelWeights:
    """The arrays of a weight (N outputs, K inputs), before they are packed and after they are unpacked."""

    codes: Tensor  # (N, K) uint8; of eight bits: int8
    header: tuple[Tensor, ...] = ()  # (N, headers) each
    scales: tuple[Tensor, ...] = ()  # (N, groups) each


def pack(weights: KernelWeights, layout: PackedLayout, per_header: int) -> Tensor:
    """(tiles, bytes); the last tile is filled with zeros."""
    codes = planes(tiled(weights.codes), layout)  # (tiles, blocks, bytes)
    scales = [tile_bytes(array).unflatten(1, (codes.shape[1], -1)) for array in weights.scales]
    stream = torch.cat([*([torch.cat(scales, -1).flatten(2)] if scales else []), codes], -1)
    if not weights.header:
        return stream.flatten(1)
    header = [tile_bytes(array) for array in weights.header]
    return torch.cat([*header, stream.unflatten(1, (-1, per_header)).flatten(2)], -1).flatten(1)


def unpack(packed: Tensor, layout: PackedLayout, per_header: int, outputs: int, inputs: int) -> KernelWeights:
    """The inverse of `pack`."""
    blocks, groups = inputs // BLOCK, BLOCK // layout.group
    header: tuple[Tensor, ...] = ()
    if layout.header:
        packed = packed.unflatten(1, (blocks // per_header, -1))
        header, packed = split_arrays(packed, layout.header, outputs)
    stream = packed.reshape(len(packed), blocks, -1)
    size = groups * TILE * sum(dtype.itemsize for dtype in layout.block_scales)
    by_group = stream[..., :size].unflatten(-1, (groups, -1)).flatten(1, 2)
    scales, _ = split_arrays(by_group, layout.block_scales, outputs)
    codes = unplanes(stream[..., size:], layout).flatten(0, 1)[:outputs]
    return KernelWeights(codes, header, scales)


def tile_bytes(array: Tensor) -> Tensor:
    """(N, n) -> (tiles, n, bytes of eight numbers)"""
    return tiled(array).transpose(1, 2).contiguous().view(torch.uint8)


def split_arrays(stored: Tensor, dtypes: tuple[torch.dtype, ...], outputs: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """(tiles, n, bytes) -> arrays (N, n) of these dtypes, which come first, and the other bytes"""
    arrays = []
    for dtype in dtypes:
        first, stored = stored.tensor_split([TILE * dtype.itemsize], -1)
        arrays.append(first.contiguous().view(dtype).transpose(1, 2).flatten(0, 1)[:outputs].contiguous())
    return tuple(arrays), stored


def tiled(values: Tensor) -> Tensor:
    """(N, …) -> (tiles, 8, …)"""
    missing = -len(values) % TILE
    return pad(values, (0, 0, 0, missing)).unflatten(0, (-1, TILE))


def planes(codes: Tensor, layout: PackedLayout) -> Tensor:
    """Codes (T, 8, K) -> (T, blocks, bytes)"""
    chunks = codes.view(torch.uint8).unflatten(-1, (-1, 8, 4)).permute(0, 2, 3, 1, 4).flatten(-2)  # (T, blocks, 8, 32)
    if layout.bits == 8:
        return chunks.flatten(2)
    parts, shift = [], 0
    for plane in layout.planes:
        per_byte = 8 // plane
        low = (chunks >> shift & (1 << plane) - 1).unflatten(2, (-1, per_byte))  # (T, blocks, vectors, per byte, 32)
        shifts = torch.arange(0, 8, plane, dtype=torch.uint8, device=codes.device).view(-1, 1)
        parts.append((low << shifts).sum(3, dtype=torch.uint8).flatten(2))
        shift += plane
    return torch.cat(parts, -1)


def unplanes(stored: Tensor, layout: PackedLayout) -> Tensor:
    """The inverse of `planes`."""
    shape = (*stored.shape[:2], 8, 32)
    if layout.bits == 8:
        chunks = stored.reshape(shape)
    else:
        chunks, start, shift = torch.zeros(shape, dtype=torch.uint8, device=stored.device), 0, 0
        for plane in layout.planes:
            size = 32 * plane
            part = stored[..., start : start + size].unflatten(-1, (-1, 1, 32))
            shifts = torch.arange(0, 8, plane, dtype=torch.uint8, device=stored.device).view(-1, 1)
            chunks |= (part >> shifts & (1 << plane) - 1).flatten(2, 3) << shift
            start, shift = start + size, shift + plane
    codes = chunks.unflatten(-1, (TILE, 4)).permute(0, 3, 1, 2, 4).flatten(2)  # (T, 8, K)
    return codes.view(torch.int8) if layout.bits == 8 else codes
