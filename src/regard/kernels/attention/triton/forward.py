"""Flash attention's forward as one Triton kernel: a program takes a tile of queries through the keys that it can see.

    S = Q_i K_jᵀ    m' = max(m, S)    P = 2^(S - m')    l = l 2^(m - m') + Σ P    O = O 2^(m - m') + P V_j

Keys come in spans: those that every query of the tile sees are taken without looking at the mask, before and after them
stand those at its edges, and keys beyond are not read. Of each row one number is kept for the backward, log₂ Σ 2^s.
Statistics (kernels/attention/statistics.py has their meaning) are carried along the same tiles. Dao 2023,
FlashAttention-2.
"""

import triton
import triton.language as tl

from regard.kernels.attention.triton.tile import (
    EMPTY,
    LOG2E,
    UNSEEN,
    bias_of,
    biased,
    bounds_of,
    capped,
    load_rows,
    my_tile,
    places,
    seen,
    span,
    store_rows,
)


@triton.jit
def forward(
    Q, K, V, Out, LogSum, Sinks, Bias, QAt, KAt, QDocument, KDocument, Bounds, Found, TopKey,
    heads, groups, length, keys, factor, inner, reach, early, FORM: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = FORM.queries
    EV: tl.constexpr = FORM.value_wide
    tile, head = my_tile(length, M)
    start = (tl.cdiv(length, M) - 1 - tile) * M  # a causal text's last rows, with most to do, go first
    b, h = head // heads, head % heads
    q = load_rows(Q, b, h, start, M, FORM.wide)  # (M, E)
    q_at, q_document = places(QAt + b * length, QDocument + b * length, start, length, M, FORM)
    if FORM.ordered:
        lo, full_lo, full_hi, hi = span(start, M, FORM.before, FORM.after, keys, FORM.keys)
    else:
        lo, full_lo, full_hi, hi = bounds_of(Bounds, b * tl.cdiv(length, FORM.grain) + start // FORM.grain)
    queries = (q, q_at[:, None], q_document[:, None])
    others = (K, V, b, h // groups, KAt + b * keys, KDocument + b * keys, keys)
    how = (factor, inner, bias_of(Bias, h, reach, FORM), reach, early)

    zeros, empty = tl.zeros([M], tl.float32), tl.full([M], EMPTY, tl.float32)
    m, total = empty, zeros
    if FORM.sinks:  # one more score, and no value
        sink = tl.load(Sinks + h).to(tl.float32) * LOG2E
        m, total = zeros + sink, zeros + 1.0
    o = tl.zeros([M, EV], tl.float32)
    state = (m, total, o, zeros, zeros, empty, tl.full([M], -1, tl.int32))
    if FORM.ordered and FORM.first > 0:
        front = tl.cdiv(FORM.first, FORM.keys) * FORM.keys
        state = through(0, tl.minimum(front, lo), state, queries, others, how, True, FORM)
    if FORM.before >= 0 or not FORM.ordered:
        state = through(lo, full_lo, state, queries, others, how, True, FORM)
    if FORM.after >= 0 or not FORM.even:
        state = through(full_hi, hi, state, queries, others, how, True, FORM)
    # Last: a loop that may be empty and is followed by another makes ptxas wait after every single product.
    state = through(full_lo, full_hi, state, queries, others, how, False, FORM)

    m, total, o, energy, on_early, best, top = state
    saw = total > 0
    total = tl.where(saw, total, 1.0)
    log_sum = tl.where(saw, m + tl.log2(total), 0.0)
    store_rows(Out, o / total[:, None], b, h, start, M, EV)
    slot = start + tl.arange(0, M)
    inside, row = slot < length, head.to(tl.int64) * length + slot
    tl.store(LogSum + row, log_sum, mask=inside)
    if FORM.statistics:
        entropy = tl.log2(total) - energy / total
        if FORM.sinks:  # what the sink takes is no key's
            entropy += tl.exp2(sink - log_sum) * (sink - log_sum)
        if FORM.ordered:
            on_early = weights_on_early(log_sum, queries, others, how, FORM)
        else:
            on_early /= total
        rows = tl.num_programs(0) // tl.cdiv(length, M) * tl.cast(length, tl.int64)
        tl.store(Found + row, entropy / LOG2E, mask=inside)
        tl.store(Found + rows + row, on_early, mask=inside)
        tl.store(Found + 2 * rows + row, tl.exp2(best - log_sum), mask=inside)
        tl.store(TopKey + row, top, mask=inside)


@triton.jit
def through(lo, hi, state, queries, others, how, EDGE: tl.constexpr, FORM: tl.constexpr):
    """The state after the keys lo … hi; EDGE: where not every query of the tile sees every key."""
    m, total, o, energy, on_early, best, top = state
    q, q_at, q_document = queries
    K, V, b, g, KAt, KDocument, keys = others
    factor, inner, bias, reach, early = how
    N: tl.constexpr = FORM.keys
    for start in tl.range(lo, hi, N):
        k = load_rows(K, b, g, start, N, FORM.wide)  # (N, E)
        s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, FORM)  # (M, N)
        unit = factor
        if EDGE or FORM.bias != "none" or FORM.statistics and not FORM.ordered:
            k_at, k_document = places(KAt, KDocument, start, keys, N, FORM)
        if EDGE or FORM.bias != "none":
            s = biased(s * factor, q_at, k_at[None, :], bias, reach, FORM)
            unit = 1.0
        if EDGE:
            s = tl.where(seen(q_at, k_at[None, :], q_document, k_document[None, :], FORM), s, UNSEEN)
        if FORM.statistics:
            peak, where = highest(s, N)
            peak *= unit
            top = tl.where(peak > best, start + where, top)
            best = tl.maximum(best, peak)
        else:
            peak = tl.max(s, 1) * unit
        higher = tl.maximum(m, peak)
        x = s * unit - higher[:, None]
        p = tl.exp2(x)  # (M, N)
        shrink = tl.exp2(m - higher)
        if FORM.statistics:
            energy = (energy + total * (m - higher)) * shrink + tl.sum(p * x, 1)
        if FORM.statistics and not FORM.ordered:
            on_early = on_early * shrink + tl.sum(tl.where((k_at < early)[None, :], p, 0.0), 1)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(V, b, g, start, N, FORM.value_wide)  # (N, Ev)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        m = higher
    return m, total, o, energy, on_early, best, top


@triton.jit
def highest(s, N: tl.constexpr):
    """Of each row about the highest score, and its column: the last bits of the scores give way to their columns."""
    columns = (N - 1 - tl.arange(0, N))[None, :]
    marked = (s.to(tl.int32, bitcast=True) & -N) | columns
    peak = tl.max(marked.to(tl.float32, bitcast=True), 1)
    return peak, N - 1 - (peak.to(tl.int32, bitcast=True) & (N - 1))


@triton.jit
def weights_on_early(log_sum, queries, others, how, FORM: tl.constexpr):
    """Of a whole text, where they stand at the front: what each row gives to its first keys."""
    q, q_at, q_document = queries
    K, _V, b, g, KAt, KDocument, keys = others
    factor, inner, bias, reach, early = how
    M: tl.constexpr = FORM.queries
    mass = tl.zeros([M], tl.float32)
    for start in tl.range(0, early, FORM.keys):
        k = load_rows(K, b, g, start, FORM.keys, FORM.wide)
        s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, FORM) * factor
        k_at, k_document = places(KAt, KDocument, start, keys, FORM.keys, FORM)
        s = biased(s, q_at, k_at[None, :], bias, reach, FORM)
        counts = seen(q_at, k_at[None, :], q_document, k_document[None, :], FORM) & (k_at < early)[None, :]
        mass += tl.sum(tl.where(counts, tl.exp2(s - log_sum[:, None]), 0.0), 1)
    return mass
