"""The two parallel passes of the scan in Triton: what every span of tokens adds to the state, and what its tokens read.

A program takes one span of one head, in chunks of C tokens; spans do not wait for each other (kernels/carry.py goes
from one to the next in between). With c_t = Σ decay from the chunk's first token to t, S the state at the border,

    out_t = near_t Sᵀ x_t + Σ_{s ≤ t} (x_t · y_s) exp(c_t - c_s) w_s        S' = exp(c_C) S + Σ_s far_s y_s w_sᵀ
    forwards     near_t = exp(c_t)           far_s = exp(c_C - c_s)
    backwards    near_t = exp(c_C - c_t)     far_s = exp(c_s)               and s ≥ t, exp(c_s - c_t)

Backwards is the adjoint of forwards, so gradients are the same pass over other tensors (spans.py says which). Tokens
of other documents than the border's, or than each other's, do not meet: there near, far and the pairs are 0.

The loops are not pipelined (one stage): Triton 3.6 would load a chunk over the last one while the product that adds it
to the state still reads it, and results would differ from run to run.
"""

import triton
import triton.language as tl


@triton.jit
def add_kernel(
    Y,
    W,
    W_more,
    Decay,
    Docs,
    Added,
    Added_more,
    Faded,
    y_strides,
    w_strides,
    heads,
    length,
    spans,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    SPAN: tl.constexpr,
    REVERSE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Added (B, H, spans, N, P) = Σ far_s y_s w_sᵀ; Faded (B, H, spans) = Σ decay.

    w may have one number more, W_more (B, H, L), which adds a column: Added_more (B, H, spans, N).
    """
    program = tl.program_id(0).to(tl.int64)
    row, span = program // spans, program % spans
    Y, W = of_head(Y, y_strides, row, heads), of_head(W, w_strides, row, heads)
    n, p, c = tl.arange(0, N), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C)
    state, tail, faded = tl.zeros((N, BLOCK), tl.float32), tl.zeros((N,), tl.float32), 0.0
    chunks = tl.cdiv(tl.minimum(length - span * SPAN, SPAN), C)
    for i in range(chunks):
        start = span * SPAN + (chunks - 1 - i if REVERSE else i) * C
        t = start + c
        y = tl.load(Y + t[:, None] * y_strides[2] + n[None, :], (t < length)[:, None], 0.0)  # (C, N)
        w = tl.load(W + t[:, None] * w_strides[2] + p[None, :], (t < length)[:, None], 0.0)  # (C, BLOCK)
        _, _, far, fade, _ = fading(Decay, Docs, row, heads, start, length, C, PER_TOKEN, REVERSE)
        if Decay is not None or Docs is not None:
            w = (w * far[:, None]).to(w.dtype)
            state *= tl.exp(fade)
        state = tl.dot(tl.trans(y), w, state, input_precision=PRECISION)
        if W_more is not None:
            w_more = tl.load(W_more + row * length + t, t < length, 0.0)
            tail = tail * tl.exp(fade) + tl.sum(y * (far * w_more)[:, None], 0)
        faded += fade
    tl.store(Added + program * N * P + n[:, None] * P + p[None, :], state)
    if tl.program_id(1) == 0:
        tl.store(Faded + program, faded)
        if W_more is not None:
            tl.store(Added_more + program * N + n, tail)


@triton.jit
def read_kernel(
    X,
    Y,
    W,
    Input,
    Decay,
    Docs,
    Borders,
    X_more,
    Y_more,
    Column,
    W_more,
    Tail,
    Out,
    Out_more,
    Dots,
    x_strides,
    y_strides,
    w_strides,
    input_strides,
    out_strides,
    state_strides,  # of the x side and of the w side of a border
    heads,
    length,
    spans,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    SPAN: tl.constexpr,
    REVERSE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Out (B, H, L, P). x and y may have one number more, X_more and Y_more (B, H, L): the state then has one row more,
    `Column` (P). Or w has one number more, W_more: then the state has one column more, `Tail` (N), read into Out_more.

    Dots (blocks, B, H, L), if wanted, are out_t · Input_t over the block: what a decay's gradient is made of.
    """
    program = tl.program_id(0).to(tl.int64)
    row, span = program // spans, program % spans
    X, Y = of_head(X, x_strides, row, heads), of_head(Y, y_strides, row, heads)
    W, Out = of_head(W, w_strides, row, heads), of_head(Out, out_strides, row, heads)
    n, p, c = tl.arange(0, N), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C)
    border = row * (spans + 1) + (span + 1 if REVERSE else span)
    state = tl.load(Borders + border * N * P + n[:, None] * state_strides[0] + p[None, :] * state_strides[1])
    if Column is not None:
        column = tl.load(Column + border * P + p)
    if Tail is not None:
        tail = tl.load(Tail + border * N + n)
    chunks = tl.cdiv(tl.minimum(length - span * SPAN, SPAN), C)
    for i in range(chunks):
        start = span * SPAN + (chunks - 1 - i if REVERSE else i) * C
        t = start + c
        some = (t < length)[:, None]
        x = tl.load(X + t[:, None] * x_strides[2] + n[None, :], some, 0.0)  # (C, N)
        y = tl.load(Y + t[:, None] * y_strides[2] + n[None, :], some, 0.0)  # (C, N)
        w = tl.load(W + t[:, None] * w_strides[2] + p[None, :], some, 0.0)  # (C, BLOCK)
        cumulated, near, far, fade, doc = fading(Decay, Docs, row, heads, start, length, C, PER_TOKEN, REVERSE)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION)  # (C, C)
        out = tl.dot(x, state.to(x.dtype), input_precision=PRECISION)  # (C, BLOCK)
        if Column is not None:
            x_more = tl.load(X_more + row * length + t, t < length, 0.0)
            y_more = tl.load(Y_more + row * length + t, t < length, 0.0)
            scores += x_more[:, None] * y_more[None, :]
            out += x_more[:, None] * column[None, :]
            column = column * tl.exp(fade) + tl.sum(w * (far * y_more)[:, None], 0)
        pairs = c[:, None] <= c[None, :] if REVERSE else c[:, None] >= c[None, :]
        if Docs is not None:
            pairs = pairs & (doc[:, None] == doc[None, :])
        if Decay is not None:
            between = cumulated[None, :] - cumulated[:, None] if REVERSE else cumulated[:, None] - cumulated[None, :]
            scores *= tl.exp(tl.where(pairs, between, 0.0))
        scores = tl.where(pairs, scores, 0.0)
        if Decay is not None or Docs is not None:
            out *= near[:, None]
        out = tl.dot(scores.to(w.dtype), w, out, input_precision=PRECISION)
        if Tail is not None:
            w_more = tl.load(W_more + row * length + t, t < length, 0.0)
            more = near * tl.sum(x * tail[None, :], 1) + tl.sum(scores * w_more[None, :], 1)
            if tl.program_id(1) == 0:
                tl.store(Out_more + row * length + t, more, t < length)
            tail = tail * tl.exp(fade) + tl.sum(y * (far * w_more)[:, None], 0)
        tl.store(Out + t[:, None] * out_strides[2] + p[None, :], out.to(Out.dtype.element_ty), some)
        if Dots is not None:
            own = of_head(Input, input_strides, row, heads) + t[:, None] * input_strides[2] + p[None, :]
            dots = tl.sum(out * tl.load(own, some, 0.0), 1)
            tl.store(Dots + (tl.program_id(1) * tl.num_programs(0) // spans + row) * length + t, dots, t < length)
        if Decay is not None or Docs is not None:
            w = (w * far[:, None]).to(w.dtype)
            state *= tl.exp(fade)
        state = tl.dot(tl.trans(y), w, state, input_precision=PRECISION)


@triton.jit
def of_head(X, strides, row, heads):
    """Where the head of this row begins: strides of a batch row, of a head, of a token; how many heads share one."""
    return X + row // heads * strides[0] + row % heads // strides[3] * strides[1]


@triton.jit
def fading(Decay, Docs, row, heads, start, length, C: tl.constexpr, PER_TOKEN: tl.constexpr, REVERSE: tl.constexpr):
    """Of a chunk's tokens: c (C,), near (C,), far (C,), the logarithm of what the state keeps, the documents (C,)."""
    c = tl.arange(0, C)
    t = start + c
    cumulated, doc = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.int32)
    if Decay is not None:
        if PER_TOKEN:
            cumulated = tl.cumsum(tl.load(Decay + row * length + t, t < length, 0.0), 0)
        else:
            cumulated = tl.load(Decay + row % heads) * tl.maximum(tl.minimum(t + 1, length) - start, 0)
    fade = tl.sum(tl.where(c == C - 1, cumulated, 0.0), 0)
    near, far = tl.exp(cumulated), tl.exp(fade - cumulated)
    if Docs is not None:
        Docs += row // heads * length
        doc = tl.load(Docs + t, t < length, -1)
        first, last = tl.load(Docs + start - 1, start > 0, 0), tl.max(doc, 0)  # documents are counted from 0
        near, far = tl.where(doc == first, near, 0.0), tl.where(doc == last, far, 0.0)
        fade = tl.where(first == last, fade, float("-inf"))
    return (cumulated, far, near, fade, doc) if REVERSE else (cumulated, near, far, fade, doc)
