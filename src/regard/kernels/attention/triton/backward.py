"""Flash attention's backward: weights are made again from log₂ Σ 2^s of each row, for the keys and for the queries.

    P = 2^(S - lse)     dV_j = Σ_i Pᵀ dO_i     dS = P ⊙ (dO_i V_jᵀ - D_i)     D_i = rowsum(dO_i ⊙ O_i)
    dK_j = scale · Σ_i (dS ⊙ cap')ᵀ Q_i        dQ_i = scale · Σ_j (dS ⊙ cap') K_j

`for_keys` takes a tile of keys through the queries that see it, of all heads that share it; `for_queries` a tile of
queries through its keys. Two passes make two of seven products twice, but each sum stays in one program's registers: no
atomic adds, the same bits every time. Dao 2023, FlashAttention-2.
"""

import triton
import triton.language as tl

from regard.kernels.attention.triton.tile import (
    UNSEEN,
    bias_of,
    biased,
    bounds_of,
    capped,
    load_rows,
    my_tile,
    on_line,
    places,
    seen,
    span,
    store_rows,
)


@triton.jit
def dots(Out, DOut, Delta, heads, length, FORM: tl.constexpr):
    """D = rowsum(dO ⊙ O) of a tile of queries."""
    M: tl.constexpr = FORM.queries
    tile, head = my_tile(length, M)
    start, b, h = tile * M, head // heads, head % heads
    out = load_rows(Out, b, h, start, M, FORM.value_wide).to(tl.float32)
    d_out = load_rows(DOut, b, h, start, M, FORM.value_wide).to(tl.float32)
    slot = start + tl.arange(0, M)
    tl.store(Delta + head.to(tl.int64) * length + slot, tl.sum(out * d_out, 1), mask=slot < length)


@triton.jit
def for_keys(
    Q, K, V, DOut, DK, DV, LogSum, Delta, Bias, QAt, KAt, QDocument, KDocument, Bounds,
    heads, groups, length, keys, scale, factor, inner, reach, FORM: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = FORM.keys
    E: tl.constexpr = FORM.wide
    EV: tl.constexpr = FORM.value_wide
    tile, head = my_tile(keys, N)
    start, b, g = tile * N, head // (heads // groups), head % (heads // groups)
    k, v = load_rows(K, b, g, start, N, E), load_rows(V, b, g, start, N, EV)
    k_at, k_document = places(KAt + b * keys, KDocument + b * keys, start, keys, N, FORM)
    here = (k, v, k_at[:, None], k_document[:, None])
    if FORM.ordered:
        lo, full_lo, full_hi, hi = span(start, N, FORM.after, FORM.before, length, FORM.queries)
        if start < FORM.first:
            hi = length
    else:
        lo, full_lo, full_hi, hi = bounds_of(Bounds, b * tl.cdiv(keys, FORM.grain) + start // FORM.grain)

    dk, dv = tl.zeros([N, E], tl.float32), tl.zeros([N, EV], tl.float32)
    for n in range(groups):
        h = g * groups + n
        row = (b * heads + h).to(tl.int64) * length
        others = (Q, DOut, b, h, LogSum + row, Delta + row, QAt + b * length, QDocument + b * length, length)
        how = (factor, inner, bias_of(Bias, h, reach, FORM), reach)
        dk, dv = through_queries(full_lo, full_hi, dk, dv, here, others, how, False, FORM)
        if FORM.after >= 0 or not FORM.ordered:
            dk, dv = through_queries(lo, full_lo, dk, dv, here, others, how, True, FORM)
        if FORM.before >= 0 or not FORM.even:
            dk, dv = through_queries(full_hi, hi, dk, dv, here, others, how, True, FORM)
    store_rows(DK, dk * scale, b, g, start, N, E)
    store_rows(DV, dv, b, g, start, N, EV)


@triton.jit
def through_queries(lo, hi, dk, dv, here, others, how, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Keys in front: all tiles are (N, M)."""
    k, v, k_at, k_document = here
    Q, DOut, b, h, LogSum, Delta, QAt, QDocument, length = others
    M: tl.constexpr = FORM.queries
    for start in tl.range(lo, hi, M):
        q = load_rows(Q, b, h, start, M, FORM.wide)  # (M, E)
        q_at, q_document = places(QAt, QDocument, start, length, M, FORM)
        log_sum = numbers_of(LogSum, start, length, M, EDGE and not FORM.even)[None, :]
        products = tl.dot(k, tl.trans(q), input_precision="ieee")  # (N, M)
        p, slope = weights(products, log_sum, q_at[None, :], k_at, q_document[None, :], k_document, how, EDGE, FORM)
        d_out = load_rows(DOut, b, h, start, M, FORM.value_wide)  # (M, Ev)
        dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision="ieee")
        delta = numbers_of(Delta, start, length, M, EDGE and not FORM.even)[None, :]
        ds = p * (tl.dot(v, tl.trans(d_out), input_precision="ieee") - delta) * slope
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def for_queries(
    Q, K, V, DOut, DQ, DBias, LogSum, Delta, Bias, QAt, KAt, QDocument, KDocument, Bounds,
    heads, groups, length, keys, scale, factor, inner, reach, FORM: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = FORM.queries
    E: tl.constexpr = FORM.wide
    tile, head = my_tile(length, M)
    start, b, h = (tl.cdiv(length, M) - 1 - tile) * M, head // heads, head % heads
    q, d_out = load_rows(Q, b, h, start, M, E), load_rows(DOut, b, h, start, M, FORM.value_wide)
    q_at, q_document = places(QAt + b * length, QDocument + b * length, start, length, M, FORM)
    row = head.to(tl.int64) * length
    log_sum = numbers_of(LogSum + row, start, length, M, not FORM.even)
    delta = numbers_of(Delta + row, start, length, M, not FORM.even)
    here = (q, d_out, log_sum[:, None], delta[:, None], q_at[:, None], q_document[:, None])
    others = (K, V, b, h // groups, KAt + b * keys, KDocument + b * keys, keys, DBias + h * (2 * reach + 1))
    how = (factor, inner, bias_of(Bias, h, reach, FORM), reach)
    if FORM.ordered:
        lo, full_lo, full_hi, hi = span(start, M, FORM.before, FORM.after, keys, FORM.keys)
    else:
        lo, full_lo, full_hi, hi = bounds_of(Bounds, b * tl.cdiv(length, FORM.grain) + start // FORM.grain)

    dq = tl.zeros([M, E], tl.float32)
    if FORM.ordered and FORM.first > 0:
        front = tl.cdiv(FORM.first, FORM.keys) * FORM.keys
        dq = through_keys(0, tl.minimum(front, lo), dq, here, others, how, True, FORM)
    if FORM.before >= 0 or not FORM.ordered:
        dq = through_keys(lo, full_lo, dq, here, others, how, True, FORM)
    if FORM.after >= 0 or not FORM.even:
        dq = through_keys(full_hi, hi, dq, here, others, how, True, FORM)
    dq = through_keys(full_lo, full_hi, dq, here, others, how, False, FORM)  # last: forward.py says why
    store_rows(DQ, dq * scale, b, h, start, M, E)


@triton.jit
def through_keys(lo, hi, dq, here, others, how, EDGE: tl.constexpr, FORM: tl.constexpr):
    q, d_out, log_sum, delta, q_at, q_document = here
    K, V, b, g, KAt, KDocument, keys, DBias = others
    N: tl.constexpr = FORM.keys
    for start in tl.range(lo, hi, N):
        k = load_rows(K, b, g, start, N, FORM.wide)  # (N, E)
        v = load_rows(V, b, g, start, N, FORM.value_wide)  # (N, Ev)
        k_at, k_document = places(KAt, KDocument, start, keys, N, FORM)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # (M, N)
        p, slope = weights(products, log_sum, q_at, k_at[None, :], q_document, k_document[None, :], how, EDGE, FORM)
        ds = p * (tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta)
        if FORM.learned:
            add_to_line(DBias, ds, q_at, k_at[None, :], how[3])
        dq = tl.dot((ds * slope).to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def add_to_line(DBias, ds, q_at, k_at, reach):
    """dS of a tile to the numbers of its distances; where all are beyond the line's reach, its sum to the outermost."""
    furthest_ahead, furthest_behind = tl.max(k_at) - tl.min(q_at), tl.min(k_at) - tl.max(q_at)
    if furthest_ahead <= -reach:
        tl.atomic_add(DBias, tl.sum(ds))
    elif furthest_behind >= reach:
        tl.atomic_add(DBias + 2 * reach, tl.sum(ds))
    else:
        tl.atomic_add(DBias + on_line(q_at, k_at, reach), ds, mask=ds != 0)


@triton.jit
def weights(products, log_sum, q_at, k_at, q_document, k_document, how, EDGE: tl.constexpr, FORM: tl.constexpr):
    """P of a tile, and the cap's derivative there."""
    factor, inner, bias, reach = how
    s, slope = capped(products, inner, FORM), 1.0
    if FORM.cap:
        slope = 1 - s * s
    s = biased(s * factor, q_at, k_at, bias, reach, FORM)
    if EDGE:
        s = tl.where(seen(q_at, k_at, q_document, k_document, FORM), s, UNSEEN)
    return tl.exp2(s - log_sum), slope


@triton.jit
def numbers_of(X, start, length, SIZE: tl.constexpr, EDGE: tl.constexpr):
    """(SIZE,) of a row from `start` on; EDGE: with zeros behind its end."""
    slot = start + tl.arange(0, SIZE)
    if EDGE:
        return tl.load(X + slot, mask=slot < length, other=0.0)
    else:
        return tl.load(X + slot)
