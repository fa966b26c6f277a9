"""A linear layer for the few tokens of a decode step, with the operations around it.

    y = residual + W n                    n = x, or RMSNorm(x)
    y = σ(W₁ n) ⊙ W₂ n                    the gated unit, its two matrices stacked in one weight (2F, D)

A decode step reads every weight once and computes little, so memory bandwidth limits it, and every small kernel between
two products costs as much as megabytes of weights. One token: a program keeps the normalized x in registers and loops
over the rows of W; the next rows are loaded before the products of these are summed. Several tokens: tensor-core
products, W on the left because their tiles have at least 64 rows; where few rows would leave multiprocessors idle,
programs split the columns, and the last one adds their sums in a fixed order. More than MAX_TOKENS: cuBLAS, which
reads the weights as fast then.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

COUNTERS = 1 << 14
MAX_TOKENS = 32


class Tiles(NamedTuple):
    outputs: int  # rows of the weight per tile
    columns: int  # columns of the weight per tile
    warps: int
    stages: int = 1
    splits: int = 1  # programs that share the columns of a tile's rows
    programs: int = 0  # for one token


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def finish(
    y, second, n, cell, bias, residual, outputs, exists, shown, out,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Bias, activation and residual of the products y, and of those with the gated unit's second matrix."""
    if BIAS:
        y += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        if BIAS:
            second += tl.load(bias + outputs + n, mask=exists, other=0.0).to(tl.float32)
        y = activate(y, ACTIVATION) * second
    if RESIDUAL:
        y += tl.load(residual + cell, mask=shown, other=0.0).to(tl.float32)
    tl.store(out + cell, y.to(out.dtype.element_ty), mask=shown)


@triton.jit
def rms_norm(values, weight, dtype, columns, eps):
    """Rounded as by RMSNormModule: the normalized values, then their products with the weight."""
    return (values * tl.rsqrt(tl.sum(values * values, 0) / columns + eps)).to(dtype) * weight


@triton.jit
def normalize(x, weight, out, columns, eps, BLOCK_K: tl.constexpr):
    k = tl.arange(0, BLOCK_K)
    row, inside = tl.program_id(0).to(tl.int64) * columns, k < columns
    values = tl.load(x + row + k, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + k, mask=inside, other=0.0)
    tl.store(out + row + k, rms_norm(values, scale, out.dtype.element_ty, columns, eps), mask=inside)


@triton.jit
def gate(pairs, out, outputs, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """σ(first half) ⊙ second half of each row."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < outputs
    first = tl.load(pairs + row * 2 * outputs + i, mask=inside).to(tl.float32)
    second = tl.load(pairs + row * 2 * outputs + outputs + i, mask=inside).to(tl.float32)
    tl.store(out + row * outputs + i, (activate(first, ACTIVATION) * second).to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_outputs(weight, n, k, outputs, columns, EVEN: tl.constexpr):
    """The rows n of a weight; those past its end are zeros."""
    mask = (n < outputs)[:, None]
    if not EVEN:
        mask &= (k < columns)[None, :]
    return tl.load(
        weight + n.to(tl.int64)[:, None] * columns + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def multiply_vector(
    x, weight, norm, bias, residual, out, outputs, columns, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One token."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    i, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    gap = outputs.to(tl.int64) * columns  # between the two matrices of the gated unit
    tile = load_outputs(weight, first * BLOCK_N + i, k, outputs, columns, EVEN)  # (N, K)
    if ACTIVATION is not None:
        second_tile = load_outputs(weight + gap, first * BLOCK_N + i, k, outputs, columns, EVEN)
    values = tl.load(x + k, mask=k < columns, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.load(norm + k, mask=k < columns, other=0.0)
        values = rms_norm(values, scale, x.dtype.element_ty, columns, eps).to(tl.float32)
    for group in range(first, tl.cdiv(outputs, BLOCK_N), programs):
        later = (group + programs) * BLOCK_N + i
        next_tile = load_outputs(weight, later, k, outputs, columns, EVEN)
        if ACTIVATION is not None:
            next_second = load_outputs(weight + gap, later, k, outputs, columns, EVEN)
        n = group * BLOCK_N + i
        y = tl.sum(tile.to(tl.float32) * values[None, :], 1)
        second = y
        if ACTIVATION is not None:
            second = tl.sum(second_tile.to(tl.float32) * values[None, :], 1)
            second_tile = next_second
        exists = n < outputs
        finish(y, second, n, n, bias, residual, outputs, exists, exists, out, BIAS, RESIDUAL, ACTIVATION)
        tile = next_tile


@triton.jit
def multiply_rows(
    x, weight, bias, residual, partial, counters, out, tokens, outputs, columns,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M tokens, transposed: (N, K) · (K, M). x, weight: descriptors, which read zeros past the ends."""
    group, split = tl.program_id(0), tl.program_id(1)
    n, m = group * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    exists, is_token = (n < outputs)[:, None], (m < tokens)[None, :]
    chunk = tl.cdiv(tl.cdiv(columns, BLOCK_K), SPLITS) * BLOCK_K
    begin = split * chunk
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(begin, tl.minimum(begin + chunk, columns), BLOCK_K):
        values = x.load([0, start]).T  # (K, M)
        y = tl.dot(weight.load([group * BLOCK_N, start]), values, y, input_precision="ieee")
        if ACTIVATION is not None:
            tile = weight.load([outputs + group * BLOCK_N, start])
            second = tl.dot(tile, values, second, input_precision="ieee")
    if SPLITS > 1:
        arrived, y, second = add_splits(
            partial, counters, group, split, y, second, ACTIVATION, BLOCK_M, BLOCK_N, SPLITS
        )
        is_token &= (m * 0 + arrived == SPLITS - 1)[None, :]
    cell = m[None, :] * outputs + n[:, None]
    finish(
        y, second, n[:, None], cell, bias, residual, outputs, exists, exists & is_token, out,
        BIAS, RESIDUAL, ACTIVATION,
    )  # fmt: skip


@triton.jit
def add_splits(
    partial, counters, group, split, y, second,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """How many programs of the group arrived before this one; for the last, the sums over all of them."""
    cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    size: tl.constexpr = BLOCK_M * BLOCK_N
    partial += group.to(tl.int64) * SPLITS * 2 * size
    tl.store(partial + split * 2 * size + cell, y)
    if ACTIVATION is not None:
        tl.store(partial + split * 2 * size + size + cell, second)
    tl.debug_barrier()  # all stores of the program precede its arrival
    arrived = tl.atomic_add(counters + group, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == SPLITS - 1:
        y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in tl.static_range(SPLITS):
            y += tl.load(partial + i * 2 * size + cell, cache_modifier=".cg")
            if ACTIVATION is not None:
                second += tl.load(partial + i * 2 * size + size + cell, cache_modifier=".cg")
        tl.store(counters + group, 0)  # for the next launch
    return arrived, y, second


def launch(
    x: Tensor,  # (tokens, D)
    weight: Tensor,  # (outputs, D), or (2 · outputs, D) with an activation
    norm: Tensor | None = None,  # (D,) weight of the RMSNorm of x
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,  # (tokens, outputs)
    activation: str | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """(tokens, outputs)"""
    tokens, columns = x.shape
    outputs = len(weight) if activation is None else len(weight) // 2
    if norm is not None and tokens > 1:
        normed, block = torch.empty_like(x), next_power_of_2(columns)
        normalize[(tokens,)](x, norm, normed, columns, eps, BLOCK_K=block, num_warps=min(max(block // 1024, 1), 16))
        x = normed
    if tokens > MAX_TOKENS:
        return multiply_many(x, weight, bias, residual, activation)
    tiles = tiles or choose_tiles(tokens, outputs, columns, activation is not None, multiprocessors(x.device))
    out = x.new_empty(tokens, outputs)
    options = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "ACTIVATION": activation}
    if tokens != 1:
        launch_rows(x, weight, bias, residual, out, tiles, options)
        return out
    multiply_vector[(min(-(-outputs // tiles.outputs), tiles.programs),)](
        x, weight, norm, bias, residual, out, outputs, columns, eps,
        NORM=norm is not None, EVEN=tiles.columns == columns, BLOCK_N=tiles.outputs, BLOCK_K=tiles.columns,
        num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip
    return out


def launch_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, tiles: Tiles,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Write the outputs of up to MAX_TOKENS tokens into `out`. options: BIAS, RESIDUAL, ACTIVATION, compiler flags."""
    tokens, outputs = out.shape
    block_m, groups = max(16, next_power_of_2(tokens)), -(-outputs // tiles.outputs)
    partial = counters = None
    if tiles.splits > 1:
        partial = x.new_empty(groups * tiles.splits * 2 * block_m * tiles.outputs, dtype=torch.float32)
        counters = arrival_counters(x.device)
    multiply_rows[groups, tiles.splits](
        TensorDescriptor.from_tensor(x, [block_m, tiles.columns]),
        TensorDescriptor.from_tensor(weight, [tiles.outputs, tiles.columns]),
        bias, residual, partial, counters, out, tokens, outputs, x.shape[1],
        BLOCK_M=block_m, BLOCK_N=tiles.outputs, BLOCK_K=tiles.columns, SPLITS=tiles.splits,
        num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip


def multiply_many(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None
) -> Tensor:
    """(tokens, outputs) by cuBLAS"""
    if residual is not None and bias is None and activation is None:
        return torch.addmm(residual, x, weight.T)
    return add_parts(torch.nn.functional.linear(x, weight, bias), residual, activation)


def add_parts(y: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    """The gated unit of products, and the residual."""
    if activation is not None:
        pairs, outputs = y, y.shape[1] // 2
        y, block = y.new_empty(len(y), outputs), min(1024, next_power_of_2(outputs))
        gate[len(y), -(-outputs // block)](pairs, y, outputs, ACTIVATION=activation, BLOCK=block, num_warps=4)
    return y if residual is None else y + residual


@torch.library.custom_op("regard::decode_linear", mutates_args=())
def decode_linear(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`launch` as an operator for compiled graphs."""
    return launch(x, weight, norm, eps, bias, residual, activation)


@decode_linear.register_fake
def _(x, weight, norm=None, eps=0.0, bias=None, residual=None, activation=None) -> Tensor:
    return x.new_empty(len(x), len(weight) if activation is None else len(weight) // 2)


@lru_cache(maxsize=1024)
def choose_tiles(tokens: int, outputs: int, columns: int, gated: bool, processors: int) -> Tiles:
    """Measured on an H200 with the matrices of Llama 8B."""
    if tokens == 1:
        block = next_power_of_2(columns)
        warps = min(max(block // 512, 1), 16)
        return Tiles(
            1 if gated or block > 16384 else 2, block, warps, programs=processors * (32 // warps if warps < 16 else 1)
        )
    if gated:
        return Tiles(64, 128, 4, 4)
    if outputs > 256 * processors:
        return Tiles(128, 128, 4, 3)
    groups, splits = -(-outputs // 64), 1
    while splits < 4 and splits * groups * 2 <= processors and columns > 256 * splits:
        splits *= 2
    return Tiles(64, 256, 4, 3, max(splits, 2 if columns > 8192 else 1))


def arrival_counters(device: torch.device) -> Tensor:
    """Zeros by which the programs of a kernel find out which is the last; that one sets them to zero again.

    Kernels of one stream run one after the other, so they share them; those of different streams must not.
    """
    return counters_of(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@lru_cache
def counters_of(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
