"""The two passes of the scan in Triton: the states at the borders of spans, and what tokens read between two of them.

With c_t = Σ decay from a span's first token to t, c_e at its end, and S the state at the border before it (or behind),

    S' = exp(c_e) S + Σ_s far_s y_s w_sᵀ           out_t = near_t Sᵀ x_t + Σ_{s ≤ t} (x_t · y_s) exp(c_t - c_s) w_s
    forwards     near_t = exp(c_t)           far_s = exp(c_e - c_s)
    backwards    near_t = exp(c_e - c_t)     far_s = exp(c_s)               and s ≥ t, exp(c_s - c_t)

Backwards is the adjoint of forwards, so gradients are the same passes over other tensors (spans.py says which). Tokens
of other documents than the border's, or than each other's, do not meet: there near, far and the pairs are 0.

The loops are not pipelined (one stage): Triton 3.6 would load a chunk over the last one while the product that adds it
to the state still reads it, and results would differ from run to run.
"""

import triton
import triton.language as tl


@triton.jit
def states_kernel(
    Y,
    W,
    W_more,
    Sums,
    Docs,
    First,
    First_more,
    Borders,
    Borders_more,
    Last,
    y_strides,
    w_strides,
    heads,
    length,
    spans,
    N: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Borders (B, H, spans + 1, N, P), and Last in float32; a program walks with some rows and columns of one state.

    w may have one number more, W_more (B, H, L), which adds a column: Borders_more (B, H, spans + 1, N).
    """
    head = tl.program_id(0).to(tl.int64)
    n, p = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = n[:, None] * P + p[None, :]
    state = tl.load(First + head * N * P + place)
    tail = tl.zeros((ROWS,), tl.float32) if W_more is None else tl.load(First_more + head * N + n)
    t = (spans - 1 if REVERSE else 0) * SPAN + tl.arange(0, SPAN).to(tl.int64)
    y, w = of_tokens(Y, y_strides, head, heads, t, n, length), of_tokens(W, w_strides, head, heads, t, p, length)
    for i in range(spans):
        span = spans - 1 - i if REVERSE else i
        border = head * (spans + 1) + (span + 1 if REVERSE else span)
        later = t - SPAN if REVERSE else t + SPAN  # its tokens are loaded while products of these are made
        y_later = of_tokens(Y, y_strides, head, heads, later, n, length)  # (SPAN, ROWS)
        w_later = of_tokens(W, w_strides, head, heads, later, p, length)  # (SPAN, BLOCK)
        tl.store(Borders + border * N * P + place, state.to(Borders.dtype.element_ty))
        far, kept = tl.full((SPAN,), 1.0, tl.float32), 1.0
        if Sums is not None:
            fade, end = tl.load(Sums + head * spans * SPAN + t), at_end(Sums, head, spans, span, SPAN)
            far, kept = tl.exp(fade if REVERSE else end - fade), tl.exp(end)
        if Docs is not None:
            doc, before, last = documents(Docs, head // heads, t, span * SPAN, SPAN, length)
            far = tl.where(doc == (before if REVERSE else last), far, 0.0)
            kept = tl.where(before == last, kept, 0.0)
        if W_more is not None and tl.program_id(2) == 0:
            tl.store(Borders_more + border * N + n, tail)
            # A sum, no product: of narrow ones Triton 3.6 reads outside of shared memory.
            tail = tail * kept + tl.sum(y * (far * of_tokens_more(W_more, head, length, t))[:, None], 0)
        if Sums is not None or Docs is not None:
            w = (w * far[:, None]).to(w.dtype)
            state *= kept
        state = tl.dot(tl.trans(y), w, state, input_precision=PRECISION)
        t, y, w = later, y_later, w_later
    border = head * (spans + 1) + (0 if REVERSE else spans)
    tl.store(Borders + border * N * P + place, state.to(Borders.dtype.element_ty))
    tl.store(Last + head * N * P + place, state)
    if W_more is not None and tl.program_id(2) == 0:
        tl.store(Borders_more + border * N + n, tail)


@triton.jit
def read_kernel(
    X,
    Y,
    W,
    Sums,
    Docs,
    Borders,
    X_more,
    Y_more,
    Column,
    W_more,
    Tail,
    Out,
    Out_more,
    V,
    Read,
    Dots,
    x_strides,
    y_strides,
    w_strides,
    v_strides,
    out_strides,
    state_strides,  # of the x side and of the w side of a border
    heads,
    length,
    spans,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    TOGETHER: tl.constexpr,
    SUMMED: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Out (B, H, L, P), one span of so many heads TOGETHER, that share x and y. Or, SUMMED, share w: then what they
    read is one sum, (B, H / TOGETHER, L, P), and before the product with w their scores are.

    x and y may have one number more, X_more and Y_more (B, H, L): the state then has one row more, `Column` (P). Or w
    has one number more, W_more: then the state has one column more, `Tail` (N), read into Out_more.

    For a decay's gradient, backwards: Dots (blocks, B, H, L) = Read_t · w_t - out_t · V_t over the block.
    """
    program, c = tl.program_id(0).to(tl.int64), tl.arange(0, SPAN)
    span, first = program % spans, program // spans * TOGETHER  # of the heads
    n, p = tl.arange(0, N), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t, here = span * SPAN + c, n[:, None] * state_strides[0] + p[None, :] * state_strides[1]
    some = (t < length)[:, None]
    border = span + 1 if REVERSE else span
    pairs = c[:, None] <= c[None, :] if REVERSE else c[:, None] >= c[None, :]
    if Docs is not None:
        doc, before, last = documents(Docs, first // heads, t, span * SPAN, SPAN, length)
        pairs = pairs & (doc[:, None] == doc[None, :])
    x = of_tokens(X, x_strides, first, heads, t, n, length)  # (SPAN, N)
    dots = tl.dot(x, tl.trans(of_tokens(Y, y_strides, first, heads, t, n, length)), input_precision=PRECISION)
    out, scores = tl.zeros((SPAN, BLOCK), tl.float32), tl.zeros((SPAN, SPAN), tl.float32)
    for i in range(TOGETHER):
        head = first + i
        if SUMMED and TOGETHER > 1:
            x = of_tokens(X, x_strides, head, heads, t, n, length)
            dots = tl.dot(x, tl.trans(of_tokens(Y, y_strides, head, heads, t, n, length)), input_precision=PRECISION)
        own, near = dots, tl.full((SPAN,), 1.0, tl.float32)
        at_border = head * (spans + 1) + border
        state = tl.load(Borders + at_border * N * P + here)  # (N, BLOCK)
        if not SUMMED:  # loads that are on their way while products are made
            w = of_tokens(W, w_strides, head, heads, t, p, length)
            place = t[:, None] * out_strides[2] + p[None, :] + of_head(out_strides, head, heads)
            if Dots is not None:
                v = of_tokens(V, v_strides, head, heads, t, p, length)
                read = tl.load(Read + place, some, 0.0)
        if Column is not None:
            x_more, y_more = of_tokens_more(X_more, head, length, t), of_tokens_more(Y_more, head, length, t)
            own += x_more[:, None] * y_more[None, :]
        if Sums is not None:
            fade = tl.load(Sums + head * spans * SPAN + t)
            between = fade[None, :] - fade[:, None] if REVERSE else fade[:, None] - fade[None, :]
            own *= tl.exp(tl.minimum(between, 0.0))  # it is above 0 only where tokens do not meet
            near = tl.exp(at_end(Sums, head, spans, span, SPAN) - fade if REVERSE else fade)
        if Docs is not None:
            near = tl.where(doc == (last if REVERSE else before), near, 0.0)
        if SUMMED:
            nearer = (x * near[:, None]).to(x.dtype) if Sums is not None or Docs is not None else x
            out = tl.dot(nearer, state, out, input_precision=PRECISION)
        else:
            out = tl.dot(x, state, input_precision=PRECISION) * near[:, None]
        if Column is not None:
            out += (near * x_more)[:, None] * tl.load(Column + at_border * P + p)[None, :]
        if SUMMED:
            scores += own
        else:
            own = tl.where(pairs, own, 0.0)
            out = tl.dot(own.to(w.dtype), w, out, input_precision=PRECISION)
            tl.store(Out + place, out.to(Out.dtype.element_ty), some)
            if Tail is not None and tl.program_id(1) == 0:
                tail = tl.load(Tail + at_border * N + n)
                w_more = of_tokens_more(W_more, head, length, t)
                more = near * tl.sum(x * tail[None, :], 1) + tl.sum(own * w_more[None, :], 1)
                tl.store(Out_more + head * length + t, more, t < length)
            if Dots is not None:
                line = tl.program_id(1) * (tl.num_programs(0) // spans) * TOGETHER + head
                tl.store(Dots + line * length + t, tl.sum(read.to(tl.float32) * w, 1) - tl.sum(out * v, 1), t < length)
    if SUMMED:
        w = of_tokens(W, w_strides, first, heads, t, p, length)
        out = tl.dot(tl.where(pairs, scores, 0.0).to(w.dtype), w, out, input_precision=PRECISION)
        place = t[:, None] * out_strides[2] + p[None, :] + of_head(out_strides, first // TOGETHER, heads // TOGETHER)
        tl.store(Out + place, out.to(Out.dtype.element_ty), some)


@triton.jit
def meet_kernel(A, B, Out, spans, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Out (R, spans) = ⟨A, B⟩ at the borders (R, spans + 1, SIZE) behind the spans."""
    program = tl.program_id(0).to(tl.int64)
    border = program + program // spans + 1  # a row has one more of them
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        place = border * SIZE + start + tl.arange(0, BLOCK)
        products += tl.load(A + place).to(tl.float32) * tl.load(B + place)
    tl.store(Out + program, tl.sum(products))


@triton.jit
def of_head(strides, head, heads):
    """Where this head begins: strides of a batch row, of a head, of a token; how many heads share one."""
    return head // heads * strides[0] + head % heads // strides[3] * strides[1]


@triton.jit
def of_tokens(X, strides, head, heads, t, e, length):
    """(tokens, E) of a head, zeros outside of the text"""
    some = (t >= 0) & (t < length)
    return tl.load(X + of_head(strides, head, heads) + t[:, None] * strides[2] + e[None, :], some[:, None], 0.0)


@triton.jit
def of_tokens_more(X, head, length, t):
    return tl.load(X + head * length + t, t < length, 0.0)


@triton.jit
def at_end(Sums, head, spans, span, SPAN: tl.constexpr):
    return tl.load(Sums + (head * spans + span) * SPAN + SPAN - 1)


@triton.jit
def documents(Docs, batch, t, start, SPAN: tl.constexpr, length):
    """Of a span's tokens (SPAN,), of the token before it and of its last one; documents are counted from 0."""
    Docs += batch * length
    before, last = tl.load(Docs + start - 1, start > 0, 0), tl.load(Docs + tl.minimum(start + SPAN, length) - 1)
    return tl.load(Docs + t, t < length, -1), before, last
