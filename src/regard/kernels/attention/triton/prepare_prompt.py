"""Projected queries, keys and values of prompts: norm, rotation, and the append to a paged cache, in one kernel.

    q, k = rotate(norm(q)), rotate(norm(k))        k and v are written to the pages of their row

A program handles all heads of one token. Tokens that are not valid are not written to the pages. It does for prompts
what decode_token.py does for the token of a decode step; the attention itself is a kernel for prompts.
"""

import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.attention.triton.decode_token import normalize_and_rotate


@triton.jit
def prepare_token(
    qkv, cos, sin, q_norm, k_norm, k_pool, v_pool, table, positions, valid, q_out,
    length, table_stride, position_stride, valid_stride, angle_stride_b, angle_stride_l, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, VALID: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, HALF)
    dtype: tl.constexpr = k_pool.dtype.element_ty
    if ROTATE:
        c = tl.load(cos + b * angle_stride_b + i * angle_stride_l + dims).to(tl.float32)[None, :]
        s = tl.load(sin + b * angle_stride_b + i * angle_stride_l + dims).to(tl.float32)[None, :]
    else:
        c = tl.zeros((1, HALF), tl.float32)
        s = tl.zeros((1, HALF), tl.float32)
    token = b * length + i
    qkv += token * (HEADS + 2 * KV_HEADS) * 2 * HALF

    h = tl.arange(0, BLOCK_H)
    exists = (h < HEADS)[:, None]
    cell = h[:, None] * 2 * HALF + dims[None, :]
    q_a, q_b = normalize_and_rotate(
        tl.load(qkv + cell, mask=exists, other=0.0), tl.load(qkv + cell + HALF, mask=exists, other=0.0),
        q_norm, c, s, dims, eps, dtype, NORM, ROTATE,
    )  # fmt: skip
    q_row = q_out + token * HEADS * 2 * HALF + cell
    tl.store(q_row, q_a, mask=exists)
    tl.store(q_row + HALF, q_b, mask=exists)

    h = tl.arange(0, BLOCK_K)
    cell = h[:, None] * 2 * HALF + dims[None, :]
    exists = (h < KV_HEADS)[:, None]
    k, v = qkv + HEADS * 2 * HALF + cell, qkv + (HEADS + KV_HEADS) * 2 * HALF + cell
    k_a, k_b = normalize_and_rotate(
        tl.load(k, mask=exists, other=0.0), tl.load(k + HALF, mask=exists, other=0.0),
        k_norm, c, s, dims, eps, dtype, NORM, ROTATE,
    )  # fmt: skip
    written = exists
    if VALID:
        written = exists & (h * 0 + tl.load(valid + b * valid_stride + i).to(tl.int32) != 0)[:, None]
    position = tl.load(positions + b * position_stride + i)
    slot = tl.load(table + b * table_stride + position // PAGE) * PAGE + position % PAGE
    cell += slot * KV_HEADS * 2 * HALF
    tl.store(k_pool + cell, k_a, mask=written)
    tl.store(k_pool + cell + HALF, k_b, mask=written)
    tl.store(v_pool + cell, tl.load(v, mask=exists, other=0.0).to(dtype), mask=written)
    tl.store(v_pool + cell + HALF, tl.load(v + HALF, mask=exists, other=0.0).to(dtype), mask=written)


def prepare_prompt(
    qkv: Tensor,  # (B, L, (H + 2 K) · E)
    angles: tuple[Tensor, Tensor] | None,  # cosines and sines (B, L, E / 2), None without a rotation
    norms: tuple[Tensor, Tensor] | None,  # (E,) weights of the norms of queries and keys
    eps: float,
    k_pool: Tensor,  # (slots, K, E)
    v_pool: Tensor,
    table: Tensor,  # (B, n)
    page: int,
    positions: Tensor,  # (B, L)
    valid: Tensor | None,  # (B, L)
    contract: bool = True,  # the compiler may contract a · b + c to one rounding
) -> Tensor:
    """The queries, (B, H, L, E)"""
    (batch, length, size), (_, kv_heads, dim) = qkv.shape, k_pool.shape
    heads = size // dim - 2 * kv_heads
    q = qkv.new_empty(batch, length, heads, dim)
    positions = positions.contiguous()
    valid = None if valid is None else valid.contiguous()
    cos, sin = angles or (None, None)
    strides = (0, 0) if cos is None else cos.stride()[:2]
    blocks = (triton.next_power_of_2(heads), triton.next_power_of_2(kv_heads))
    prepare_token[batch, length](
        qkv, cos, sin, *(norms or (None, None)), k_pool, v_pool, table, positions, valid, q,
        length, table.stride(0), positions.stride(0), 0 if valid is None else valid.stride(0), *strides, eps,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, PAGE=page, NORM=norms is not None,
        ROTATE=cos is not None, VALID=valid is not None, BLOCK_H=blocks[0], BLOCK_K=blocks[1],
        num_warps=max(1, min(8, blocks[0] * dim // 512)), enable_fp_fusion=contract,
    )  # fmt: skip
    return q.transpose(1, 2)
