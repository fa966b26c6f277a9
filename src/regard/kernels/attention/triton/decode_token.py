"""One decode step of causal attention over a paged cache, from the projected queries, keys and values, in one kernel.

    q, k = rotate(norm(q)), rotate(norm(k))        k and v are appended to the pages of their row
    o = softmax(q Kᵀ · scale) V                    over the cached keys and k

A program handles one kv head of one row, or a split of its keys. The last program of a row's split keys merges their
results. Rows that are not valid are skipped. It computes what decode_kernels.py does after a rotation and an append.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.attention.triton.tile import LOWEST
from regard.kernels.triton_decode_linear import arrival_counters

SPLIT = tl.constexpr(256)  # fewest keys per program
PROGRAMS = 528  # four per multiprocessor of a large GPU
MAX_SPLITS = 32


@triton.jit
def load_half(base, rows, dims, exists):
    return tl.load(base + rows[:, None] * (2 * dims.shape[0]) + dims[None, :], mask=exists[:, None], other=0.0)


@triton.jit
def normalize_and_rotate(a, b, weight, cos, sin, dims, eps, dtype, NORM: tl.constexpr, ROTATE: tl.constexpr):
    """Both halves of vectors (…, E / 2), in the dtype of the cache."""
    half: tl.constexpr = dims.shape[0]
    if NORM:
        a, b = a.to(tl.float32), b.to(tl.float32)
        rms = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
        a = (a * rms).to(dtype) * tl.load(weight + dims)[None, :]
        b = (b * rms).to(dtype) * tl.load(weight + half + dims)[None, :]
    if ROTATE:
        a, b = a.to(tl.float32), b.to(tl.float32)
        a, b = a * cos - b * sin, b * cos + a * sin
    return a.to(dtype), b.to(dtype)


@triton.jit
def merge(partial, counter, index, splits, m, l, o_a, o_b, rows, dims, BLOCK_M: tl.constexpr, HALF: tl.constexpr):  # noqa: E741
    """How many splits arrived before this one; for the last, the sums and outputs of all of them."""
    size: tl.constexpr = 2 * HALF + 2
    mine = partial + (index * BLOCK_M + rows) * size
    tl.store(mine[:, None] + dims[None, :], o_a)
    tl.store(mine[:, None] + HALF + dims[None, :], o_b)
    tl.store(mine + 2 * HALF, m)
    tl.store(mine + 2 * HALF + 1, l)
    tl.debug_barrier()  # all stores of the program precede its arrival
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == splits - 1:
        m = tl.full([BLOCK_M], LOWEST, tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        o_a = tl.zeros([BLOCK_M, HALF], tl.float32)
        o_b = tl.zeros([BLOCK_M, HALF], tl.float32)
        for i in range(splits):
            other = partial + (i * BLOCK_M + rows) * size
            other_m = tl.load(other + 2 * HALF, cache_modifier=".cg")
            new_m = tl.maximum(m, other_m)
            rescale, weight = tl.exp2(m - new_m), tl.exp2(other_m - new_m)
            l = l * rescale + weight * tl.load(other + 2 * HALF + 1, cache_modifier=".cg")  # noqa: E741
            other_a = tl.load(other[:, None] + dims[None, :], cache_modifier=".cg")
            other_b = tl.load(other[:, None] + HALF + dims[None, :], cache_modifier=".cg")
            o_a = o_a * rescale[:, None] + weight[:, None] * other_a
            o_b = o_b * rescale[:, None] + weight[:, None] * other_b
            m = new_m
        tl.store(counter, 0)  # for the next launch
    return arrived, l, o_a, o_b


@triton.jit
def attend_token(
    qkv, cos, sin, q_norm, k_norm, k_pool, v_pool, table, positions, valid, partial, counters, out,
    table_stride, last_page, position_stride, valid_stride, angle_stride, factor, eps, before, row_size,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, VALID: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """GROUP query heads of one of HEADS kv heads, of dimension 2 · HALF."""
    head, index, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, HALF)
    exists = rows < GROUP
    position = tl.load(positions + b * position_stride)
    used = True
    if VALID:
        used = tl.load(valid + b * valid_stride) != 0
    begin = position * 0
    if WINDOW:
        begin = tl.maximum(position - before, 0)
    splits = tl.minimum(tl.maximum((position - begin) // SPLIT, 1), SPLITS)
    if not used:
        splits = splits * 0
        if index == 0:
            o_row = out + (b * HEADS + head) * GROUP * 2 * HALF + rows[:, None] * 2 * HALF + dims[None, :]
            zeros = tl.zeros((BLOCK_M, HALF), out.dtype.element_ty)
            tl.store(o_row, zeros, mask=exists[:, None])
            tl.store(o_row + HALF, zeros, mask=exists[:, None])
    if index < splits:
        dtype: tl.constexpr = k_pool.dtype.element_ty
        qkv += b * row_size
        q = qkv + head * GROUP * 2 * HALF
        if ROTATE:
            c = tl.load(cos + b * angle_stride + dims).to(tl.float32)[None, :]
            s = tl.load(sin + b * angle_stride + dims).to(tl.float32)[None, :]
        else:
            c = tl.zeros((1, HALF), tl.float32)
            s = tl.zeros((1, HALF), tl.float32)
        q_a, q_b = normalize_and_rotate(
            load_half(q, rows, dims, exists), load_half(q + HALF, rows, dims, exists),
            q_norm, c, s, dims, eps, dtype, NORM, ROTATE,
        )  # fmt: skip
        k = qkv + (HEADS * GROUP + head) * 2 * HALF  # of the token itself: loaded early, added last
        v = k + HEADS * 2 * HALF
        one = tl.arange(0, 1)
        k_a, k_b = normalize_and_rotate(
            load_half(k, one, dims, one < 1), load_half(k + HALF, one, dims, one < 1),
            k_norm, c, s, dims, eps, dtype, NORM, ROTATE,
        )  # fmt: skip
        v_a, v_b = load_half(v, one, dims, one < 1), load_half(v + HALF, one, dims, one < 1)
        own_page = tl.load(table + b * table_stride + tl.minimum(position // PAGE, last_page))
        chunk = tl.cdiv(tl.cdiv(position - begin, splits), BLOCK_N) * BLOCK_N
        low = begin + index * chunk
        high = tl.minimum(low + chunk, position)

        m = tl.full([BLOCK_M], LOWEST, tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741 (the papers' letter)
        o_a = tl.zeros([BLOCK_M, HALF], tl.float32)
        o_b = tl.zeros([BLOCK_M, HALF], tl.float32)
        kv = (head * 2 * HALF + dims)[None, :]
        for start in range(low, high, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            inside = n < high
            page = tl.load(table + b * table_stride + tl.minimum(n // PAGE, last_page), mask=inside, other=0)
            slot = (page * PAGE + n % PAGE)[:, None] * (HEADS * 2 * HALF) + kv
            keys_a = tl.load(k_pool + slot, mask=inside[:, None], other=0.0)  # (N, E / 2)
            keys_b = tl.load(k_pool + slot + HALF, mask=inside[:, None], other=0.0)
            values_a = tl.load(v_pool + slot, mask=inside[:, None], other=0.0)
            values_b = tl.load(v_pool + slot + HALF, mask=inside[:, None], other=0.0)
            scores = tl.dot(q_a, tl.trans(keys_a), input_precision="ieee")
            scores = tl.dot(q_b, tl.trans(keys_b), scores, input_precision="ieee") * factor  # (M, N)
            scores = tl.where(inside[None, :], scores, LOWEST)
            new_m = tl.maximum(m, tl.max(scores, 1))
            rescale = tl.exp2(m - new_m)
            p = tl.exp2(scores - new_m[:, None])
            l = l * rescale + tl.sum(p, 1)  # noqa: E741
            o_a = tl.dot(p.to(dtype), values_a, o_a * rescale[:, None], input_precision="ieee")
            o_b = tl.dot(p.to(dtype), values_b, o_b * rescale[:, None], input_precision="ieee")
            m = new_m

        if index == splits - 1:
            slot = own_page * PAGE + position % PAGE
            slot = slot * (HEADS * 2 * HALF) + kv
            tl.store(k_pool + slot, k_a)
            tl.store(k_pool + slot + HALF, k_b)
            tl.store(v_pool + slot, v_a.to(dtype))
            tl.store(v_pool + slot + HALF, v_b.to(dtype))
            wide_a, wide_b = q_a.to(tl.float32) * k_a.to(tl.float32), q_b.to(tl.float32) * k_b.to(tl.float32)
            score = (tl.sum(wide_a, 1) + tl.sum(wide_b, 1)) * factor  # (M,)
            new_m = tl.maximum(m, score)
            rescale, p_one = tl.exp2(m - new_m), tl.exp2(score - new_m)
            l = l * rescale + p_one  # noqa: E741
            o_a = o_a * rescale[:, None] + p_one[:, None] * v_a.to(tl.float32)
            o_b = o_b * rescale[:, None] + p_one[:, None] * v_b.to(tl.float32)
            m = new_m

        if SPLITS > 1:  # noqa: SIM102 (known when the kernel is compiled)
            if splits > 1:
                group = b * HEADS + head
                arrived, l, o_a, o_b = merge(  # noqa: E741
                    partial + group * SPLITS * BLOCK_M * (2 * HALF + 2), counters + group, index, splits,
                    m, l, o_a, o_b, rows, dims, BLOCK_M, HALF,
                )  # fmt: skip
                exists &= rows * 0 + arrived == splits - 1
        o_row = out + (b * HEADS + head) * GROUP * 2 * HALF + rows[:, None] * 2 * HALF + dims[None, :]
        tl.store(o_row, (o_a / l[:, None]).to(dtype), mask=exists[:, None])
        tl.store(o_row + HALF, (o_b / l[:, None]).to(dtype), mask=exists[:, None])


def decode_token(
    qkv: Tensor,  # (B, (H + 2 K) · E)
    cos: Tensor | None,  # (B, E / 2) of the rotation, None without one
    sin: Tensor | None,
    q_norm: Tensor | None,  # (E,) weights of the norms of queries and keys
    k_norm: Tensor | None,
    eps: float,
    k_pool: Tensor,  # (slots, K, E)
    v_pool: Tensor,
    table: Tensor,  # (B, n) pages; the last one also holds all later positions, modulo its size, if there is a window
    page: int,
    positions: Tensor,  # (B,)
    valid: Tensor | None,  # (B,)
    scale: float,
    before: int,  # the number of earlier tokens in the window; -1: all
    block: int = 128,
    splits: int | None = None,
    warps: int = 4,
    stages: int = 2,
) -> Tensor:
    """(B, H · E)"""
    (batch, row_size), (_, kv_heads, dim) = qkv.shape, k_pool.shape
    heads = row_size // dim - 2 * kv_heads
    capacity = table.shape[1] * page
    if splits is None:
        splits = max(1, min(PROGRAMS // (batch * kv_heads), capacity // 256, MAX_SPLITS))
    group = heads // kv_heads
    block_m = max(16, 1 << (group - 1).bit_length())
    partial = counters = None
    if splits > 1:
        partial = torch.empty(batch * kv_heads * splits * block_m * (dim + 2), device=qkv.device)
        counters = arrival_counters(qkv.device)
    out = qkv.new_empty(batch, heads * dim)
    attend_token[kv_heads, splits, batch](
        qkv, cos, sin, q_norm, k_norm, k_pool, v_pool, table, positions, valid, partial, counters, out,
        table.stride(0), table.shape[1] - 1, positions.stride(0), 0 if valid is None else valid.stride(0),
        0 if cos is None else cos.stride(0), scale * math.log2(math.e), eps, before, row_size,
        HEADS=kv_heads, GROUP=group, HALF=dim // 2, PAGE=page, SPLITS=splits,
        NORM=q_norm is not None, ROTATE=cos is not None, VALID=valid is not None, WINDOW=before >= 0,
        BLOCK_M=block_m, BLOCK_N=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
