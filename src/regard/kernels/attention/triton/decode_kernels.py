"""Attention of few queries to many keys: each program handles a split of the keys, then splits are merged.

    program (b, kv head, split)     m, l, o over the keys of the split, for all queries of the group
    program (b, head, query)        out = Σ_splits e^(m - M) o / (Σ_splits e^(m - M) l + e^(sink - M))        M = max m

A decode step reads every key once and computes little, so memory bandwidth limits it: all queries of a kv head share
one load of its keys, and the keys of a row are split over many multiprocessors. Keys that no query attends to, outside
of the window or after the sequence, are not read. In a paged cache the slot of a key is looked up in the block table
of its row. Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.attention.triton.tile import (
    LOG2E,
    LOWEST,
    MASKED,
    NO_DOCUMENT,
    add_bias,
    apply_cap,
    head_bias,
    is_allowed,
)

PROGRAMS = 1024  # enough to occupy all multiprocessors of a GPU
MAX_SPLITS = 64  # merged by one program
SCAN = tl.constexpr(512)  # positions per step of the search for allowed keys


class DecodeConfig(NamedTuple):
    """Compile-time constants of the kernels, with the fields that the functions of tile.py read."""

    page: int  # slots per page; 0: keys are contiguous
    valid: bool
    before: int  # largest allowed distance of a key before the query, and after it; -1: no limit
    after: int
    first: int  # number of first tokens that every query attends to
    cap: bool
    bias: str  # "none", "slopes", or "offsets": one number per offset


@triton.jit
def attend_split(
    q, k, v, table, q_positions, k_positions, valid, bias, partial,
    k_row_stride, k_head_stride, k_slot_stride, v_row_stride, v_head_stride, v_slot_stride,
    table_row_stride, q_positions_row_stride, k_positions_row_stride, valid_row_stride,
    tanh_factor, factor, max_distance, keys, split, splits,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, LENGTH: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """QUERIES rows of one kv head (its query heads times LENGTH), in a tile of BLOCK_M, over `split` keys."""
    head, split_index, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, dims, value_dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    row = (b * HEADS + head) * QUERIES + rows  # among all queries (B, H, L)
    exists = rows < QUERIES
    q_tile = tl.load(q + row[:, None] * DIM + dims[None, :], mask=exists[:, None], other=0.0)  # (M, E)
    i = tl.load(q_positions + b * q_positions_row_stride + rows % LENGTH).to(tl.int32)  # (M,) positions
    q_head = head * (QUERIES // LENGTH) + tl.minimum(rows, QUERIES - 1) // LENGTH
    if CONFIG.bias != "none":
        bias = head_bias(bias, q_head[:, None], max_distance, CONFIG)

    begin, end = split_index * split, tl.minimum(split_index * split + split, keys)
    low, high = end, begin  # range of the keys that any query attends to
    first, last = tl.min(i, 0), tl.max(i, 0)
    for start in range(begin, end, SCAN):
        n = start + tl.arange(0, SCAN)
        j = tl.load(k_positions + b * k_positions_row_stride + n, mask=n < end, other=0).to(tl.int32)
        near = n < end
        if CONFIG.before >= 0:
            near &= (j >= first - CONFIG.before) | (j < CONFIG.first)
        if CONFIG.after >= 0:
            near &= j <= last + CONFIG.after
        low = tl.minimum(low, tl.min(tl.where(near, n, end), 0))
        high = tl.maximum(high, tl.max(tl.where(near, n + 1, begin), 0))

    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741 (the papers' letter)
    o = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    k += b * k_row_stride + head * k_head_stride
    v += b * v_row_stride + head * v_head_stride
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < high
        slot = n.to(tl.int64)
        if CONFIG.page:
            slot = (
                tl.load(table + b * table_row_stride + n // CONFIG.page, mask=inside, other=0) * CONFIG.page
                + n % CONFIG.page
            )
        k_tile = tl.load(k + slot[:, None] * k_slot_stride + dims[None, :], mask=inside[:, None], other=0.0)  # (N, E)
        v_tile = tl.load(
            v + slot[:, None] * v_slot_stride + value_dims[None, :], mask=inside[:, None], other=0.0
        )  # (N, Ev)
        j = tl.load(k_positions + b * k_positions_row_stride + n, mask=inside, other=0).to(tl.int32)
        is_valid = inside
        if CONFIG.valid:
            is_valid &= tl.load(valid + b * valid_row_stride + n, mask=inside, other=0) != 0
        document = tl.where(is_valid, 0, NO_DOCUMENT)
        s = apply_cap(tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee"), tanh_factor, CONFIG) * factor  # (M, N)
        s = add_bias(s, i[:, None], j[None, :], bias, max_distance, CONFIG)
        s = tl.where(is_allowed(i[:, None], j[None, :], 0, document[None, :], CONFIG), s, MASKED)
        new_m = tl.maximum(m, tl.max(s, 1))
        rescale = tl.exp2(m - new_m)
        p = tl.exp2(s - new_m[:, None])
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        o = tl.dot(p.to(v_tile.dtype), v_tile, o * rescale[:, None], input_precision="ieee")
        m = new_m

    partial += (row * splits + split_index) * (VALUE_DIM + 2)  # o, m, l
    tl.store(partial[:, None] + value_dims[None, :], o, mask=exists[:, None])
    tl.store(partial + VALUE_DIM, m, mask=exists)
    tl.store(partial + VALUE_DIM + 1, l, mask=exists)


@triton.jit
def merge_splits(
    partial, sinks, out, splits,
    HEADS: tl.constexpr, LENGTH: tl.constexpr, VALUE_DIM: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n, value_dims = tl.arange(0, SPLITS), tl.arange(0, VALUE_DIM)
    inside = n < splits
    partial += (row * splits + n) * (VALUE_DIM + 2)
    m = tl.load(partial + VALUE_DIM, mask=inside, other=LOWEST)
    max_m = tl.max(m, 0)
    if SINKS:
        sink = tl.load(sinks + row // LENGTH % HEADS).to(tl.float32) * LOG2E
        max_m = tl.maximum(max_m, sink)
    rescale = tl.exp2(m - max_m)
    l = tl.sum(tl.load(partial + VALUE_DIM + 1, mask=inside, other=0.0) * rescale, 0)  # noqa: E741
    if SINKS:
        l += tl.exp2(sink - max_m)  # noqa: E741
    o = tl.load(partial[:, None] + value_dims[None, :], mask=inside[:, None], other=0.0)  # (splits, Ev)
    o = tl.sum(o * rescale[:, None], 0) / tl.where(l > 0, l, 1.0)  # zeros for a query without any allowed key
    tl.store(out + row * VALUE_DIM + value_dims, o.to(out.dtype.element_ty))


@torch.library.custom_op("regard::decode", mutates_args=())
def decode(
    q: Tensor,  # (B, H, L, E)
    k: Tensor,  # (B, K, S, E); with a table the pool (slots, K, E)
    v: Tensor,
    table: Tensor | None,  # (B, n)
    page: int,  # slots per page
    q_positions: Tensor,  # (B, L)
    k_positions: Tensor,  # (B, S)
    valid: Tensor | None,  # (B, S)
    before: int,  # largest allowed distance before and after the query; -1: no limit
    after: int,
    first: int,  # number of first tokens that every query attends to
    scale: float,
    cap: float | None,
    bias: str,  # kind; the values are (H,) for "slopes", (H, 2 · max_distance + 1) for "offsets"
    bias_values: Tensor | None,
    sinks: Tensor | None,  # (H,)
) -> Tensor:
    return launch(
        q, k, v, table, page, q_positions, k_positions, valid,
        before, after, first, scale, cap, bias, bias_values, sinks,
    )  # fmt: skip


@decode.register_fake
def _(q, k, v, *arguments) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def launch(
    q, k, v, table, page, q_positions, k_positions, valid, before, after, first, scale, cap, bias, bias_values, sinks,
    block: int | None = None, splits: int | None = None, warps: int | None = None, stages: int = 3,
) -> Tensor:  # fmt: skip
    (rows, heads, length, dim), value_dim, keys = q.shape, v.shape[-1], k_positions.shape[1]
    q, k, v, q_positions, k_positions = (
        q.contiguous(),
        row_major(k),
        row_major(v),
        row_major(q_positions),
        row_major(k_positions),
    )
    kv_heads = k.shape[1]
    queries = heads // kv_heads * length
    block = (64 if q.element_size() == 2 else 32) if block is None else block
    splits = choose_splits(rows * kv_heads, keys) if splits is None else splits
    split = -(-keys // (splits * block)) * block
    partial = q.new_empty(rows, heads, length, splits, value_dim + 2, dtype=torch.float32)
    out = q.new_empty(rows, heads, length, value_dim)
    strides = [(0, x.stride(1), x.stride(0)) if page else x.stride()[:3] for x in (k, v)]
    log2e = math.log2(math.e)
    tanh_factor, factor = (0.0, scale * log2e) if cap is None else (2 * log2e * scale / cap, cap * log2e)
    attend_split[kv_heads, splits, rows](
        q, k, v, table, q_positions, k_positions, valid, bias_values, partial,
        *strides[0], *strides[1], table.stride(0) if page else 0, q_positions.stride(0), k_positions.stride(0),
        0 if valid is None else valid.stride(0),
        tanh_factor, factor, bias_values.shape[1] // 2 if bias == "offsets" else 0, keys, split, splits,
        HEADS=kv_heads, QUERIES=queries, LENGTH=length, DIM=dim, VALUE_DIM=value_dim,
        BLOCK_M=max(16, next_power_of_2(queries)), BLOCK_N=block,
        CONFIG=DecodeConfig(page, valid is not None, before, after, first, cap is not None, bias),
        num_warps=warps or (4 if queries <= 64 else 8),
        num_stages=stages,
    )  # fmt: skip
    merge_splits[(rows * heads * length,)](
        partial, sinks, out, splits,
        HEADS=heads, LENGTH=length, VALUE_DIM=value_dim, SPLITS=next_power_of_2(splits), SINKS=sinks is not None,
    )  # fmt: skip
    return out


def choose_splits(pairs: int, keys: int) -> int:
    """The number of splits of the keys, for this many (row, kv head) pairs; at least 256 keys per split."""
    return max(1, min(PROGRAMS // pairs, keys // 256, MAX_SPLITS))


def next_power_of_2(n: int) -> int:
    """The next power of two; triton.next_power_of_2 is slow enough to delay a decode step."""
    return 1 << (n - 1).bit_length()


def row_major(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
