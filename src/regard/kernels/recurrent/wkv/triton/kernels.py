"""RWKV's recurrence in Triton: one thread per channel, which processes a span of the sequence in tiles of T tokens.

Forward, with the sums before token t as (value, weight, peak), and l_t the logarithm of the divisor of out_t:

    state_t = e^{w} state_{t-1} + e^{k_t} (v_t, 1)          out_t = (value e^{peak} + e^{u + k_t} v_t) / e^{l_t}

Backward, R_t = ∂loss/∂state_t is a recurrence of the same kind from the end, so the same merge prevents overflow:

    R_{t-1} = e^{-l_t} dout_t (1, -out_t) + e^{w} R_t
    dv_t = e^{k_t} R_t · (1, 0) + share_t dout_t            share_t = e^{u + k_t - l_t}
    dk_t = e^{k_t} R_t · (v_t, 1) + du_t                    du_t = share_t dout_t (v_t - out_t)
    dw_t = e^{w} ⟨R_t, state_{t-1}⟩                         state_{t-1} = e^{l_t} (past_t, 1 - share_t)

where past_t is the part of out_t from state_{t-1}; it is saved, because out_t - share_t v_t would cancel. In both
directions row r of a tile needs the sums before its token, so it adds the previous token: the sums that are carried
between tiles and spans lack the last token, which the next one adds. Tiles are (T, channels) for the reason given in
selective_scan/triton/kernels.py.
"""

import triton
import triton.language as tl

from regard.kernels.recurrent.wkv import EMPTY

EMPTY_PEAK = tl.constexpr(EMPTY)


@triton.jit(do_not_specialize=["shift"])
def add_kernel(
    X, Y, Z, Decay, Documents, Counted, Added, shift, length, channels, spans,
    SPAN: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Added (B, spans, 4, F): the sums over the tokens of each span, and its log decay."""
    batch, span, f, exists = program_tile(spans, channels, BLOCK)
    r, w = tl.arange(0, T), tl.load(Decay + f, exists, 0.0)
    value, weight, left = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    peak = tl.full((BLOCK,), EMPTY_PEAK, tl.float32)
    for step in range(SPAN // T):
        if REVERSE:
            j = (span + 1) * SPAN - 1 - step * T - r
            own = gradients(X, Y, Z, Documents, Counted, batch, j + 1, f, w, shift, length, channels)
        else:
            i = span * SPAN + step * T + r
            own = additions(X, Y, Documents, Counted, batch, i - 1, f, w, shift, length, channels)
        value, weight, peak, _, _, _ = scan_tile(own, value, weight, peak, r, T)
        left += tl.sum(own[3], 0)
    sums = Added + (batch * spans + span) * 4 * channels + f
    tl.store(sums, value, exists)
    tl.store(sums + channels, weight, exists)
    tl.store(sums + 2 * channels, peak, exists)
    tl.store(sums + 3 * channels, left, exists)


@triton.jit
def carry_kernel(Added, First, Borders, channels, spans, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """Borders (B, spans, 3, F), one after the other: the only serial step."""
    batch, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = f < channels
    value, weight, peak = load_sums(First + batch * 3 * channels, f, channels)
    for i in range(spans):
        index = batch * spans + (spans - 1 - i if REVERSE else i)
        border = Borders + index * 3 * channels + f
        tl.store(border, value, exists)
        tl.store(border + channels, weight, exists)
        tl.store(border + 2 * channels, peak, exists)
        more_value, more_weight, more_peak = load_sums(Added + index * 4 * channels, f, channels)
        left = tl.load(Added + (index * 4 + 3) * channels + f, exists, 0.0)
        value, weight, peak, _ = merge(value, weight, peak, left, more_value, more_weight, more_peak, left)


@triton.jit(do_not_specialize=["shift"])
def read_kernel(
    K, V, Decay, Bonus, Documents, Counted, Borders, Out, Past, LogSum, Last, shift, length, channels, spans,
    SPAN: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row r of a tile holds the sums before token i: it adds token i - 1, and computes out_i."""
    batch, span, f, exists = program_tile(spans, channels, BLOCK)
    r, w, u = tl.arange(0, T), tl.load(Decay + f, exists, 0.0), tl.load(Bonus + f, exists, 0.0)
    value, weight, peak = load_sums(Borders + (batch * spans + span) * 3 * channels, f, channels)
    for step in range(tl.minimum(SPAN, length + 1 - span * SPAN + T - 1) // T):
        i = span * SPAN + step * T + r
        own = additions(K, V, Documents, Counted, batch, i - 1, f, w, shift, length, channels)
        value, weight, peak, values, weights, peaks = scan_tile(own, value, weight, peak, r, T)
        if span * SPAN + step * T == length // T * T:
            last = Last + batch * 3 * channels + f
            tl.store(last, row(values, r, length % T), exists)
            tl.store(last + channels, row(weights, r, length % T), exists)
            tl.store(last + 2 * channels, row(peaks, r, length % T), exists)
        k, inside = load_tokens(K, batch, i, f, shift, length, channels)
        v, _ = load_tokens(V, batch, i, f, shift, length, channels)
        _, _, continues = load_steps(Documents, Counted, batch, i, w, length)
        peaks = tl.where(continues, peaks, EMPTY_PEAK)
        top = tl.maximum(peaks, u[None, :] + k)
        past, now = tl.exp(peaks - top), tl.exp(u[None, :] + k - top)
        total = past * weights + now
        offset = (batch * length + i)[:, None] * channels + f[None, :] + shift
        tl.store(Out + offset, ((past * values + now * v) / total).to(Out.dtype.element_ty), inside)
        if Past is not None:
            tl.store(Past + offset, past * values / total, inside)
            tl.store(LogSum + offset, top + tl.log(total), inside)


@triton.jit(do_not_specialize=["shift"])
def grad_kernel(
    K, V, Decay, Bonus, Documents, Counted, Out, Past, LogSum, First, Borders, dOut, dK, dV, dSums, dFirst,
    shift, length, channels, spans, SPAN: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles from the last to the first, and tokens of a tile likewise: row r is token j, which needs R_j."""
    batch, span, f, exists = program_tile(spans, channels, BLOCK)
    r, w, u = tl.arange(0, T), tl.load(Decay + f, exists, 0.0), tl.load(Bonus + f, exists, 0.0)
    ra, rb, peak = load_sums(Borders + (batch * spans + span) * 3 * channels, f, channels)
    dw, du = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    tiles = tl.minimum(SPAN, length - span * SPAN + T - 1) // T
    for step in range(tiles):
        j = span * SPAN + (tiles - step) * T - 1 - r
        own = gradients(dOut, Out, LogSum, Documents, Counted, batch, j + 1, f, w, shift, length, channels)
        ra, rb, peak, ras, rbs, peaks = scan_tile(own, ra, rb, peak, r, T)
        k, inside = load_tokens(K, batch, j, f, shift, length, channels)
        v, _ = load_tokens(V, batch, j, f, shift, length, channels)
        d_out, _ = load_tokens(dOut, batch, j, f, shift, length, channels)
        out, _ = load_tokens(Out, batch, j, f, shift, length, channels)
        log_sum, _ = load_tokens(LogSum, batch, j, f, shift, length, channels)
        adds, _, _ = load_steps(Documents, Counted, batch, j, w, length)
        adds = adds & inside
        kept = tl.where(adds, tl.exp(k + peaks), 0.0)
        past, _ = load_tokens(Past, batch, j, f, shift, length, channels)
        share = tl.where(inside, tl.exp(u[None, :] + k - log_sum), 0.0)
        d_decay = tl.exp(tl.maximum(w[None, :] + peaks + log_sum, EMPTY_PEAK)) * (ras * past + rbs * (1.0 - share))
        dw += tl.sum(tl.where(adds, d_decay, 0.0), 0)
        share *= d_out
        by_state, by_bonus = kept * (ras * v + rbs), share * (v - out)
        offset = (batch * length + j)[:, None] * channels + f[None, :] + shift
        tl.store(dV + offset, (kept * ras + share).to(dV.dtype.element_ty), inside)
        tl.store(dK + offset, (by_state + by_bonus).to(dK.dtype.element_ty), inside)
        du += tl.sum(by_bonus, 0)
    sums = dSums + (batch * spans + span) * 2 * channels + f
    tl.store(sums, dw, exists)
    tl.store(sums + channels, du, exists)
    if span == 0:  # the first token remains: it reads the initial state
        offset = batch * length * channels + f
        d_out = tl.load(dOut + offset, exists, 0.0).to(tl.float32)
        out = tl.load(Out + offset, exists, 0.0).to(tl.float32)
        decay = w if Counted is None else tl.where(tl.load(Counted + batch * length) != 0, w, 0.0)
        ra, rb, peak, _ = merge(ra, rb, peak, w, d_out, -d_out * out, -tl.load(LogSum + offset, exists, 0.0), decay)
        a, b, top = load_sums(First + batch * 3 * channels, f, channels)
        scale = tl.exp(tl.maximum(peak + top, EMPTY_PEAK))
        tl.store(dFirst + batch * 3 * channels + f, scale * ra, exists)
        tl.store(dFirst + (batch * 3 + 1) * channels + f, scale * rb, exists)
        tl.store(dFirst + (batch * 3 + 2) * channels + f, scale * (ra * a + rb * b), exists)


@triton.jit
def program_tile(spans, channels, BLOCK: tl.constexpr):
    """Batch row, span and channels of this program, and which channels exist."""
    program, f = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return (program // spans).to(tl.int64), program % spans, f, f < channels


@triton.jit
def additions(K, V, Documents, Counted, batch, t, f, w, shift, length, channels):
    """The contributions of tokens t: value, weight, peak; and the log decay of the previous sums. (T, BLOCK)"""
    k, inside = load_tokens(K, batch, t, f, shift, length, channels)
    v, _ = load_tokens(V, batch, t, f, shift, length, channels)
    adds, decay, _ = load_steps(Documents, Counted, batch, t, w, length)
    adds = adds & inside
    return tl.where(adds, v, 0.0), tl.where(adds, 1.0, 0.0), tl.where(adds, k, EMPTY_PEAK), decay


@triton.jit
def gradients(dOut, Out, LogSum, Documents, Counted, batch, t, f, w, shift, length, channels):
    """The same in reverse: the gradients of the state from the outputs of tokens t."""
    d_out, inside = load_tokens(dOut, batch, t, f, shift, length, channels)
    out, _ = load_tokens(Out, batch, t, f, shift, length, channels)
    log_sum, _ = load_tokens(LogSum, batch, t, f, shift, length, channels)
    _, decay, continues = load_steps(Documents, Counted, batch, t, w, length)
    reads = continues & inside
    decay = tl.where(inside, decay, 0.0)
    return tl.where(reads, d_out, 0.0), tl.where(reads, -d_out * out, 0.0), tl.where(reads, -log_sum, EMPTY_PEAK), decay


@triton.jit
def load_sums(X, f, channels):
    """Value, weight and peak of these channels."""
    exists = f < channels
    value, weight = tl.load(X + f, exists, 0.0), tl.load(X + channels + f, exists, 0.0)
    return value, weight, tl.load(X + 2 * channels + f, exists, EMPTY_PEAK)


@triton.jit
def load_tokens(X, batch, t, f, shift, length, channels):
    """(T, BLOCK) in float32, and which of them exist."""
    inside = (f < channels)[None, :] & ((t >= 0) & (t < length))[:, None]
    offset = (batch * length + t)[:, None] * channels + f[None, :] + shift
    return tl.load(X + offset, inside, 0.0).to(tl.float32), inside


@triton.jit
def load_steps(Documents, Counted, batch, t, w, length):
    """Per token whether it adds to the sums (T, 1), the log decay before it (T, BLOCK), and whether it continues a
    document (T, 1).
    """
    inside = tl.minimum(tl.maximum(t, 0), length - 1)
    adds = (t >= 0) & (t < length)
    if Counted is not None:
        adds = adds & (tl.load(Counted + batch * length + inside) != 0)
    continues = t > -2
    decay = tl.where(adds[:, None], w[None, :], 0.0)
    if Documents is not None:
        Documents += batch * length
        previous = tl.minimum(tl.maximum(t - 1, 0), length - 1)
        continues = tl.load(Documents + inside) == tl.load(Documents + previous)
        decay = tl.where(continues[:, None], decay, EMPTY_PEAK)
    return adds[:, None], decay, continues[:, None]


@triton.jit
def row(x, r, i):
    return tl.sum(tl.where((r == i)[:, None], x, 0.0), 0)


@triton.jit
def scan_tile(own, value, weight, peak, r, T: tl.constexpr):
    """From the carried sums and the contribution of each row: the sums to carry on, and those of all rows."""
    first, old = (r == 0)[:, None], tl.maximum(peak[None, :] + own[3], EMPTY_PEAK)
    top = tl.maximum(old, own[2])
    mine, theirs = tl.exp(own[2] - top), tl.exp(old - top)
    values = tl.where(first, own[0] * mine + value[None, :] * theirs, own[0])
    weights = tl.where(first, own[1] * mine + weight[None, :] * theirs, own[1])
    values, weights, peaks, _ = tl.associative_scan((values, weights, tl.where(first, top, own[2]), own[3]), 0, merge)
    return row(values, r, T - 1), row(weights, r, T - 1), row(peaks, r, T - 1), values, weights, peaks


@triton.jit
def merge(value, weight, peak, decay, value_next, weight_next, peak_next, decay_next):
    old = tl.maximum(peak + decay_next, EMPTY_PEAK)
    top = tl.maximum(old, peak_next)
    mine, theirs = tl.exp(old - top), tl.exp(peak_next - top)
    return value * mine + value_next * theirs, weight * mine + weight_next * theirs, top, decay + decay_next
