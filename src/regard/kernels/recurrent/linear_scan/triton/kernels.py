"""The two passes of the linear scan in Triton: states at the borders of spans, and the outputs inside each span.

With c_t = Σ log_decay from the first token of a span to t, c_e at its end, and S the state at the border before it (in
reverse: after it),

    S' = exp(c_e) S + Σ_s far_s y_s w_sᵀ           out_t = near_t Sᵀ x_t + Σ_{s ≤ t} (x_t · y_s) exp(c_t - c_s) w_s
    forward      near_t = exp(c_t)           far_s = exp(c_e - c_s)
    reverse      near_t = exp(c_e - c_t)     far_s = exp(c_s)               and s ≥ t, exp(c_s - c_t)

The reverse pass is the adjoint of the forward pass, so gradients are the same passes over other tensors (autograd.py
lists them). For tokens of different documents near, far and the pairs are 0.

The loops are not pipelined (one stage): Triton 3.6 would load a chunk over the previous one while the product that adds
it to the state still reads it, and results would differ from run to run.
"""

import triton
import triton.language as tl


@triton.jit
def states_kernel(
    Y, W, W_extra, Sums, Documents, First, First_extra, Borders, Borders_extra, Last, y_strides, w_strides,
    heads, length, spans, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Borders (B, H, spans + 1, N, P), and Last in float32; a program handles a tile of rows and columns of one state.

    W_extra (B, H, L) is an optional further column of w, with the states Borders_extra (B, H, spans + 1, N).
    """
    head = tl.program_id(0).to(tl.int64)
    n, p = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    offset = n[:, None] * P + p[None, :]
    state = tl.load(First + head * N * P + offset)
    extra = tl.zeros((ROWS,), tl.float32) if W_extra is None else tl.load(First_extra + head * N + n)
    t = (spans - 1 if REVERSE else 0) * SPAN + tl.arange(0, SPAN).to(tl.int64)
    y, w = load_tokens(Y, y_strides, head, heads, t, n, length), load_tokens(W, w_strides, head, heads, t, p, length)
    for i in range(spans):
        span = spans - 1 - i if REVERSE else i
        border = head * (spans + 1) + (span + 1 if REVERSE else span)
        t_next = t - SPAN if REVERSE else t + SPAN  # loaded while the products of this span are computed
        y_next = load_tokens(Y, y_strides, head, heads, t_next, n, length)  # (SPAN, ROWS)
        w_next = load_tokens(W, w_strides, head, heads, t_next, p, length)  # (SPAN, BLOCK)
        tl.store(Borders + border * N * P + offset, state.to(Borders.dtype.element_ty))
        far, factor = tl.full((SPAN,), 1.0, tl.float32), 1.0
        if Sums is not None:
            decay, end = tl.load(Sums + head * spans * SPAN + t), span_decay(Sums, head, spans, span, SPAN)
            far, factor = tl.exp(decay if REVERSE else end - decay), tl.exp(end)
        if Documents is not None:
            document, before, last = load_documents(Documents, head // heads, t, span * SPAN, SPAN, length)
            far = tl.where(document == (before if REVERSE else last), far, 0.0)
            factor = tl.where(before == last, factor, 0.0)
        if W_extra is not None and tl.program_id(2) == 0:
            tl.store(Borders_extra + border * N + n, extra)
            # A sum instead of a product: for narrow products Triton 3.6 reads outside of shared memory.
            extra = extra * factor + tl.sum(y * (far * load_extra(W_extra, head, length, t))[:, None], 0)
        if Sums is not None or Documents is not None:
            w = (w * far[:, None]).to(w.dtype)
            state *= factor
        state = tl.dot(tl.trans(y), w, state, input_precision=PRECISION)
        t, y, w = t_next, y_next, w_next
    border = head * (spans + 1) + (0 if REVERSE else spans)
    tl.store(Borders + border * N * P + offset, state.to(Borders.dtype.element_ty))
    tl.store(Last + head * N * P + offset, state)
    if W_extra is not None and tl.program_id(2) == 0:
        tl.store(Borders_extra + border * N + n, extra)


@triton.jit
def read_kernel(
    X, Y, W, Sums, Documents, Borders, X_extra, Y_extra, State_row, W_extra, State_column, Out, Out_extra,
    V, Forward_out, Dots,
    x_strides, y_strides, w_strides, v_strides, out_strides, state_strides, heads, length, spans,
    N: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    SUMMED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out (B, H, L, P) of one span, for HEADS_PER_PROGRAM heads that share x and y. If SUMMED they share w instead, and
    the output is their sum, (B, H / HEADS_PER_PROGRAM, L, P): their scores are summed before the product with w.

    X_extra and Y_extra (B, H, L) are an optional further coordinate of x and y; State_row (P) is its row of the state.
    W_extra (B, H, L) is an optional further column of w; State_column (N) is its column of the state, and Out_extra its
    output. `state_strides` are those of a border, along x and along w.

    For the gradient of log_decay, in reverse: Dots (blocks, B, H, L) = Forward_out_t · w_t - out_t · V_t per block.
    """
    program, c = tl.program_id(0).to(tl.int64), tl.arange(0, SPAN)
    span, first_head = program % spans, program // spans * HEADS_PER_PROGRAM
    n, p = tl.arange(0, N), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t, state_offset = span * SPAN + c, n[:, None] * state_strides[0] + p[None, :] * state_strides[1]
    inside = (t < length)[:, None]
    border = span + 1 if REVERSE else span
    pairs = c[:, None] <= c[None, :] if REVERSE else c[:, None] >= c[None, :]
    if Documents is not None:
        document, before, last = load_documents(Documents, first_head // heads, t, span * SPAN, SPAN, length)
        pairs = pairs & (document[:, None] == document[None, :])
    x, dots = load_and_multiply(X, Y, x_strides, y_strides, first_head, heads, t, n, length, PRECISION)
    out, scores = tl.zeros((SPAN, BLOCK), tl.float32), tl.zeros((SPAN, SPAN), tl.float32)
    for i in range(HEADS_PER_PROGRAM):
        head = first_head + i
        if SUMMED and HEADS_PER_PROGRAM > 1:
            x, dots = load_and_multiply(X, Y, x_strides, y_strides, head, heads, t, n, length, PRECISION)
        head_scores, near = dots, tl.full((SPAN,), 1.0, tl.float32)
        border_row = head * (spans + 1) + border
        state = tl.load(Borders + border_row * N * P + state_offset)  # (N, BLOCK)
        if not SUMMED:  # loads that overlap with the products
            w = load_tokens(W, w_strides, head, heads, t, p, length)
            offset = t[:, None] * out_strides[2] + p[None, :] + head_offset(out_strides, head, heads)
            if Dots is not None:
                v = load_tokens(V, v_strides, head, heads, t, p, length)
                forward_out = tl.load(Forward_out + offset, inside, 0.0)
        if State_row is not None:
            x_extra, y_extra = load_extra(X_extra, head, length, t), load_extra(Y_extra, head, length, t)
            head_scores += x_extra[:, None] * y_extra[None, :]
        if Sums is not None:
            head_scores, near = apply_decays(head_scores, Sums, head, spans, span, t, SPAN, REVERSE)
        if Documents is not None:
            near = tl.where(document == (last if REVERSE else before), near, 0.0)
        if SUMMED:
            x_near = (x * near[:, None]).to(x.dtype) if Sums is not None or Documents is not None else x
            out = tl.dot(x_near, state, out, input_precision=PRECISION)
        else:
            out = tl.dot(x, state, input_precision=PRECISION) * near[:, None]
        if State_row is not None:
            out += (near * x_extra)[:, None] * tl.load(State_row + border_row * P + p)[None, :]
        if SUMMED:
            scores += head_scores
        else:
            head_scores = tl.where(pairs, head_scores, 0.0)
            out = tl.dot(head_scores.to(w.dtype), w, out, input_precision=PRECISION)
            tl.store(Out + offset, out.to(Out.dtype.element_ty), inside)
            if State_column is not None and tl.program_id(1) == 0:
                store_extra(
                    Out_extra, State_column + border_row * N + n, W_extra, x, head_scores, near, head, length, t
                )
            if Dots is not None:
                dots_row = tl.program_id(1) * (tl.num_programs(0) // spans) * HEADS_PER_PROGRAM + head
                tl.store(
                    Dots + dots_row * length + t,
                    tl.sum(forward_out.to(tl.float32) * w, 1) - tl.sum(out * v, 1),
                    t < length,
                )
    if SUMMED:
        w = load_tokens(W, w_strides, first_head, heads, t, p, length)
        out = tl.dot(tl.where(pairs, scores, 0.0).to(w.dtype), w, out, input_precision=PRECISION)
        offset = t[:, None] * out_strides[2] + p[None, :]
        offset += head_offset(out_strides, first_head // HEADS_PER_PROGRAM, heads // HEADS_PER_PROGRAM)
        tl.store(Out + offset, out.to(Out.dtype.element_ty), inside)


@triton.jit
def load_and_multiply(X, Y, x_strides, y_strides, head, heads, t, n, length, PRECISION: tl.constexpr):
    """x (SPAN, N) of a head, and its products x_t · y_s (SPAN, SPAN)."""
    x = load_tokens(X, x_strides, head, heads, t, n, length)
    y = load_tokens(Y, y_strides, head, heads, t, n, length)
    return x, tl.dot(x, tl.trans(y), input_precision=PRECISION)


@triton.jit
def apply_decays(scores, Sums, head, spans, span, t, SPAN: tl.constexpr, REVERSE: tl.constexpr):
    """The scores (SPAN, SPAN) decayed between the tokens of each pair, and near (SPAN,)."""
    decay = tl.load(Sums + head * spans * SPAN + t)
    between = decay[None, :] - decay[:, None] if REVERSE else decay[:, None] - decay[None, :]
    scores *= tl.exp(tl.minimum(between, 0.0))  # positive only for pairs that are masked
    return scores, tl.exp(span_decay(Sums, head, spans, span, SPAN) - decay if REVERSE else decay)


@triton.jit
def store_extra(Out_extra, State_column, W_extra, x, scores, near, head, length, t):
    """The output of the further column of w; State_column points to the column (N,) of the state."""
    state_column = tl.load(State_column)
    w_extra = load_extra(W_extra, head, length, t)
    extra_out = near * tl.sum(x * state_column[None, :], 1) + tl.sum(scores * w_extra[None, :], 1)
    tl.store(Out_extra + head * length + t, extra_out, t < length)


@triton.jit
def inner_product_kernel(A, B, Out, spans, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Out (R, spans) = ⟨A, B⟩ at the borders (R, spans + 1, SIZE) after the spans."""
    program = tl.program_id(0).to(tl.int64)
    border = program + program // spans + 1  # a row has one more border than spans
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        offset = border * SIZE + start + tl.arange(0, BLOCK)
        products += tl.load(A + offset).to(tl.float32) * tl.load(B + offset)
    tl.store(Out + program, tl.sum(products))


@triton.jit
def head_offset(strides, head, heads):
    """The offset of a head. `strides` are those of rows, heads and tokens, and the number of heads that share one."""
    return head // heads * strides[0] + head % heads // strides[3] * strides[1]


@triton.jit
def load_tokens(X, strides, head, heads, t, e, length):
    """(tokens, E) of a head; zeros outside of the sequence"""
    inside = (t >= 0) & (t < length)
    return tl.load(X + head_offset(strides, head, heads) + t[:, None] * strides[2] + e[None, :], inside[:, None], 0.0)


@triton.jit
def load_extra(X, head, length, t):
    return tl.load(X + head * length + t, t < length, 0.0)


@triton.jit
def span_decay(Sums, head, spans, span, SPAN: tl.constexpr):
    return tl.load(Sums + (head * spans + span) * SPAN + SPAN - 1)


@triton.jit
def load_documents(Documents, batch, t, start, SPAN: tl.constexpr, length):
    """The documents, counted from 0, of the tokens of a span (SPAN,), of the token before it and of its last token."""
    Documents += batch * length
    before, last = (
        tl.load(Documents + start - 1, start > 0, 0),
        tl.load(Documents + tl.minimum(start + SPAN, length) - 1),
    )
    return tl.load(Documents + t, t < length, -1), before, last
