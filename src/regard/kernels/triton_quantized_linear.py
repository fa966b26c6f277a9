"""The linear layer of triton_decode_linear.py with weights of 4 or 8 bits, which are expanded in registers.

    W' = s (q - z)        s, z: of groups of inputs of one output; FP8: W' = s q

One token: x / max |x| is rounded to float16, the products of the codes are summed, and scaled per group:

    y = Σ s (Σ q x - z Σ x)

Several tokens: tiles of W' in the dtype of x are multiplied by tensor cores. More than MAX_TOKENS: W' is written to
memory for cuBLAS. With FP8, tensor cores multiply the codes by x in FP8 then, with a scale per token.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton_decode_linear import (
    MAX_TOKENS,
    Tiles,
    add_parts,
    add_splits,
    arrival_counters,
    finish,
    multiply_many,
    multiprocessors,
    next_power_of_2,
    normalize,
)
from regard.kernels.triton_word_products import FP8_FACTOR, INT4_CODES, load_inputs, pairs, word_products

FP8 = torch.float8_e4m3fn


class QuantizedWeight(NamedTuple):
    codes: Tensor  # (outputs, bytes): uint8, two codes of four bits per byte, the first in the low bits; or float8
    scale: Tensor  # (outputs, groups)
    zero: Tensor | None  # (outputs, groups) uint8; None: the middle of the range, or FP8
    bits: int
    columns: int

    @property
    def outputs(self) -> int:
        return len(self.codes)

    @property
    def group(self) -> int:
        return self.columns // self.scale.shape[1]

    @property
    def options(self) -> dict[str, Any]:
        """Constants of the kernels."""
        centre = 0 if self.codes.dtype == FP8 else 1 << self.bits - 1
        return {"BITS": self.bits, "CENTRE": centre, "ZERO": self.zero is not None}

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """W' (outputs, columns)"""
        out = torch.empty(self.outputs, self.columns, dtype=dtype, device=self.codes.device)
        write_expanded[-(-self.outputs // 16), -(-self.columns // 256)](
            self.codes, self.scale, self.zero, out, *out.shape, self.scale.shape[1], self.group,
            BLOCK_N=16, BLOCK_K=256, GROUPS=max(256 // self.group, 1), num_warps=4, **self.options,
        )  # fmt: skip
        return out


@triton.jit
def load_words(codes, n, k, outputs, width):
    mask = (n < outputs)[:, None] & (k < width)[None, :]
    cells = codes + n.to(tl.int64)[:, None] * width + k[None, :]
    return tl.load(cells, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_groups(values, n, g, outputs, groups):
    mask = (n < outputs)[:, None] & (g < groups)[None, :]
    return tl.load(values + n.to(tl.int64)[:, None] * groups + g[None, :], mask=mask, other=0.0)


@triton.jit
def scaled_sums(
    products, sums, scale, zero, SHIFT: tl.constexpr,
    CENTRE: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(N,) products (N, W) summed per group and scaled; sums: of x, per group; GROUP: words"""
    y = tl.sum(tl.reshape(products, (BLOCK_N, GROUPS, GROUP)), 2)  # (N, G)
    if ZERO:
        y -= (zero.to(tl.float32) - SHIFT) * sums[None, :]
    elif CENTRE > SHIFT:
        y -= (CENTRE - SHIFT) * sums[None, :]
    return tl.sum(y * scale.to(tl.float32), 1)


@triton.jit
def multiply_vector_quantized(
    x, codes, scale, zero, norm, bias, residual, out, outputs, columns, groups, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BITS: tl.constexpr, FLOAT: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One token. codes: words of 32 bits; BLOCK: words of a row, a power of two."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    i, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
    count: tl.constexpr = 32 // BITS
    width = columns // count
    rows = outputs if ACTIVATION is None else 2 * outputs
    group_words: tl.constexpr = BLOCK // GROUPS
    g = tl.arange(0, GROUPS)
    shift: tl.constexpr = 128 if BITS == 8 and not FLOAT else 0  # which `word_products` has subtracted from codes
    tile = load_words(codes, first * BLOCK_N + i, k, outputs, width)
    tile_scale = load_groups(scale, first * BLOCK_N + i, g, outputs, groups)
    tile_zero = tile_scale
    if ZERO:
        tile_zero = load_groups(zero, first * BLOCK_N + i, g, outputs, groups)
    if ACTIVATION is not None:
        second_tile = load_words(codes, outputs + first * BLOCK_N + i, k, rows, width)
        second_scale = load_groups(scale, outputs + first * BLOCK_N + i, g, rows, groups)
        second_zero = second_scale
        if ZERO:
            second_zero = load_groups(zero, outputs + first * BLOCK_N + i, g, rows, groups)
    values, unit = load_inputs(x, norm, columns, eps, NORM, count, BLOCK, PTX)  # (W, count)
    sums = tl.sum(tl.reshape(values, (GROUPS, group_words * count)), 1)
    if FLOAT:
        unit *= FP8_FACTOR
    if PTX and BITS == 4:
        sums *= INT4_CODES
        unit *= 1 / INT4_CODES
    p0, p1, p2, p3 = pairs(values, count, BLOCK, PTX)
    for group in range(first, tl.cdiv(outputs, BLOCK_N), programs):
        later = (group + programs) * BLOCK_N + i
        next_tile = load_words(codes, later, k, outputs, width)
        next_scale = load_groups(scale, later, g, outputs, groups)
        next_zero = next_scale
        if ZERO:
            next_zero = load_groups(zero, later, g, outputs, groups)
        if ACTIVATION is not None:
            next_second = load_words(codes, outputs + later, k, rows, width)
            next_second_scale = load_groups(scale, outputs + later, g, rows, groups)
            next_second_zero = next_second_scale
            if ZERO:
                next_second_zero = load_groups(zero, outputs + later, g, rows, groups)
        n = group * BLOCK_N + i
        products = word_products(tile, p0, p1, p2, p3, BITS, FLOAT, PTX)
        y = scaled_sums(products, sums, tile_scale, tile_zero, shift, CENTRE, ZERO, BLOCK_N, GROUPS, group_words)
        y *= unit
        second = y
        if ACTIVATION is not None:
            products = word_products(second_tile, p0, p1, p2, p3, BITS, FLOAT, PTX)
            second = scaled_sums(
                products, sums, second_scale, second_zero, shift, CENTRE, ZERO, BLOCK_N, GROUPS, group_words
            )
            second *= unit
            second_tile, second_scale, second_zero = next_second, next_second_scale, next_second_zero
        exists = n < outputs
        finish(y, second, n, n, bias, residual, outputs, exists, exists, out, BIAS, RESIDUAL, ACTIVATION)
        tile, tile_scale, tile_zero = next_tile, next_scale, next_zero


@triton.jit
def code_number(codes):
    """2^23 + codes: a conversion of integers takes longer than setting the last bits of this number."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def expand(
    codes, scale, zero, n, start, end, outputs, columns, groups, group, dtype,
    BITS: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """W' (N, K) of the inputs from `start` on, zeros after `end`. GROUPS: in BLOCK_K inputs. SCALE: else W' / s"""
    per_byte: tl.constexpr = 8 // BITS
    k = start // per_byte + tl.arange(0, BLOCK_K // per_byte)
    mask = (n < outputs)[:, None] & (k < end // per_byte)[None, :]
    tile = tl.load(codes + n.to(tl.int64)[:, None] * (columns // per_byte) + k[None, :], mask=mask, other=0.0)
    if CENTRE == 0:
        values = tile.to(dtype)  # FP8
    elif BITS == 4:
        values = tl.reshape(tl.join(code_number(tile & 15), code_number(tile >> 4)), (BLOCK_N, BLOCK_K))
    else:
        values = code_number(tile)
    g = start // group + tl.arange(0, GROUPS)
    if CENTRE > 0 and not ZERO:
        values -= 8388608.0 + CENTRE
    if SCALE or ZERO:
        values = tl.reshape(values, (BLOCK_N, GROUPS, BLOCK_K // GROUPS))
        if ZERO:
            values -= 8388608.0 + load_groups(zero, n, g, outputs, groups).to(tl.float32)[:, :, None]
        if SCALE:
            values = values.to(tl.float32) * load_groups(scale, n, g, outputs, groups).to(tl.float32)[:, :, None]
        values = tl.reshape(values, (BLOCK_N, BLOCK_K))
    return values.to(dtype)


@triton.jit
def write_expanded(
    codes, scale, zero, out, outputs, columns, groups, group,
    BITS: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    n, start = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_K
    weight = expand(
        codes, scale, zero, n, start, columns, outputs, columns, groups, group, out.dtype.element_ty,
        BITS, CENTRE, ZERO, BLOCK_N, BLOCK_K, GROUPS, True,
    )  # fmt: skip
    k = start + tl.arange(0, BLOCK_K)
    mask = (n < outputs)[:, None] & (k < columns)[None, :]
    tl.store(out + n.to(tl.int64)[:, None] * columns + k[None, :], weight, mask=mask)


@triton.jit
def multiply_rows_quantized(
    x, codes, scale, zero, bias, residual, partial, counters, out, tokens, outputs, columns, groups, group,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BITS: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M tokens, transposed: (N, K) · (K, M). WHOLE: one scale per output, which multiplies the sums."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    exists, is_token = (n < outputs)[:, None], (m < tokens)[None, :]
    rows = outputs if ACTIVATION is None else 2 * outputs
    chunk = tl.cdiv(tl.cdiv(columns, BLOCK_K), SPLITS) * BLOCK_K
    begin = split * chunk
    end = tl.minimum(begin + chunk, columns)
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    dtype = x.dtype.element_ty
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x + m[None, :] * columns + k[:, None], mask=is_token & (k < end)[:, None], other=0.0)  # (K, M)
        weight = expand(
            codes, scale, zero, n, start, end, outputs, columns, groups, group, dtype,
            BITS, CENTRE, ZERO, BLOCK_N, BLOCK_K, GROUPS, not WHOLE,
        )  # fmt: skip
        y = tl.dot(weight, values, y, input_precision="ieee")
        if ACTIVATION is not None:
            weight = expand(
                codes, scale, zero, outputs + n, start, end, rows, columns, groups, group, dtype,
                BITS, CENTRE, ZERO, BLOCK_N, BLOCK_K, GROUPS, not WHOLE,
            )  # fmt: skip
            second = tl.dot(weight, values, second, input_precision="ieee")
    if WHOLE:
        y *= tl.load(scale + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            second *= tl.load(scale + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    if SPLITS > 1:
        arrived, y, second = add_splits(partial, counters, tile, split, y, second, ACTIVATION, BLOCK_M, BLOCK_N, SPLITS)
        is_token &= (m * 0 + arrived == SPLITS - 1)[None, :]
    cell = m[None, :] * outputs + n[:, None]
    finish(
        y, second, n[:, None], cell, bias, residual, outputs, exists, exists & is_token, out,
        BIAS, RESIDUAL, ACTIVATION,
    )  # fmt: skip


def launch_quantized(
    x: Tensor,  # (tokens, D)
    weight: QuantizedWeight,  # (outputs, D), or (2 · outputs, D) with an activation
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """(tokens, outputs)"""
    tokens, columns = x.shape
    outputs = weight.outputs if activation is None else weight.outputs // 2
    if norm is not None and tokens > 1:
        normed, block = torch.empty_like(x), next_power_of_2(columns)
        normalize[(tokens,)](x, norm, normed, columns, eps, BLOCK_K=block, num_warps=min(max(block // 1024, 1), 16))
        x = normed
    if tokens > MAX_TOKENS:
        if weight.codes.dtype == FP8 and fp8_compute(x, weight):
            y = fp8_product(x, weight)
            return add_parts(y if bias is None else y + bias, residual, activation)
        return multiply_many(x, weight.expanded(x.dtype), bias, residual, activation)
    out, groups = x.new_empty(tokens, outputs), weight.scale.shape[1]
    is_float = weight.codes.dtype == FP8
    options = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "ACTIVATION": activation} | weight.options
    width = next_power_of_2(columns * weight.bits // 32)
    gated, processors = activation is not None, multiprocessors(x.device)
    tiles = tiles or choose_quantized_tiles(tokens, outputs, width, columns, gated, processors)
    if tokens == 1:
        padded = 1 if groups == 1 else width * 32 // weight.bits // weight.group
        multiply_vector_quantized[(min(-(-outputs // tiles.outputs), tiles.programs),)](
            x, weight.codes.view(torch.int32), weight.scale, weight.zero, norm, bias, residual, out, outputs, columns,
            groups, eps, NORM=norm is not None, BLOCK_N=tiles.outputs, BLOCK=width, GROUPS=padded, FLOAT=is_float,
            PTX=x.device.type == "cuda" and torch.version.hip is None, num_warps=tiles.warps, **options,
        )  # fmt: skip
        return out
    block_m, count = max(16, next_power_of_2(tokens)), -(-outputs // tiles.outputs)
    partial = counters = None
    if tiles.splits > 1:
        partial = x.new_empty(count * tiles.splits * 2 * block_m * tiles.outputs, dtype=torch.float32)
        counters = arrival_counters(x.device)
    multiply_rows_quantized[count, tiles.splits](
        x, weight.codes, weight.scale, weight.zero, bias, residual, partial, counters, out,
        tokens, outputs, columns, groups, weight.group,
        BLOCK_M=block_m, BLOCK_N=tiles.outputs, BLOCK_K=tiles.columns, GROUPS=max(tiles.columns // weight.group, 1),
        SPLITS=tiles.splits, WHOLE=groups == 1, num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip
    return out


@lru_cache(maxsize=1024)
def choose_quantized_tiles(tokens: int, outputs: int, width: int, columns: int, gated: bool, processors: int) -> Tiles:
    """width: words of a row, rounded up to a power of two. Measured on an H200 with the matrices of Llama 8B."""
    if tokens == 1:
        warps = 4 if width <= 1024 else 8 if width <= 4096 else 16
        rows = 1024 * warps // (2 * width if gated else width)  # 32 words per thread, so about 128 registers
        while rows > 1 and (rows > 16 or rows * processors > outputs):
            rows //= 2
        return Tiles(max(rows, 1), width, warps, programs=processors * 16 // warps)  # all that fit at the same time
    count, splits = -(-outputs // 64), 1
    while splits < 4 and splits * count * 2 <= processors and columns > 256 * splits:
        splits *= 2
    return Tiles(64, 128, 4, 3, splits)


@torch.library.custom_op("regard::quantized_linear", mutates_args=())
def quantized_linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """(tokens, inputs) -> (tokens, outputs); `launch_quantized` as an operator for compiled graphs."""
    return launch_quantized(x, QuantizedWeight(codes, scale, zero, bits, x.shape[1]))


@quantized_linear.register_fake
def _(x, codes, scale, zero, bits) -> Tensor:
    return x.new_empty(len(x), len(codes))


def fp8_compute(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether tensor cores multiply FP8 here; then products are in bfloat16, and dims are multiples of 16."""
    multiples = weight.outputs % 16 == 0 and weight.columns % 16 == 0 and weight.scale.shape[1] == 1
    return (
        x.is_cuda and x.dtype == torch.bfloat16 and multiples and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )


@triton.jit
def round_rows(x, out, scale, columns, BLOCK_K: tl.constexpr):
    """x in FP8 with a scale per row."""
    k, row = tl.arange(0, BLOCK_K), tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * columns + k, mask=k < columns, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(values), 0) / 448.0, 1e-12)
    rounded = tl.minimum(tl.maximum(values / s, -448.0), 448.0).to(out.dtype.element_ty)
    tl.store(out + row * columns + k, rounded, mask=k < columns)
    tl.store(scale + row, s)


def fp8_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """(tokens, outputs) by FP8 tensor cores, with one scale per token and one per output"""
    rounded, scale = torch.empty_like(x, dtype=FP8), x.new_empty(len(x), 1, dtype=torch.float32)
    block = next_power_of_2(x.shape[1])
    round_rows[(len(x),)](x, rounded, scale, x.shape[1], BLOCK_K=block, num_warps=min(max(block // 1024, 1), 16))
    by_output = weight.scale.float().view(1, -1)
    return torch._scaled_mm(
        rounded, weight.codes.t(), scale_a=scale, scale_b=by_output, out_dtype=x.dtype, use_fast_accum=True
    )
