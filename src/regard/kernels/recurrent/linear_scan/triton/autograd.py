"""The linear scan on GPUs: spans of tokens in parallel, in Triton. The forward has two kernels (kernels.py):

    states   at the borders of spans, one after the other
    read     the outputs of every token, from the state at the border and from its own span

read (x, y, w) is out_t = Σ_{s≤t} decay(s, t) (x_t · y_s) w_s. With D_t = ∂loss/∂S_t = q_t do_tᵀ + exp(log_decay_{t+1})
D_{t+1}, a scan from the end, the gradients are reads of other tensors:

    dq_t = S_t do_t       read (do, v, k)
    dk_t = D_t v_t        read in reverse (v, do, q)
    dv_t = D_tᵀ k_t       read in reverse (k, q, do)
    dlog_decay_t = ⟨D_t, S_t - k_t v_tᵀ⟩ = ⟨D_e, S_e⟩ + Σ_{t≤u≤e} (q_u · dq_u - k_u · dk_u)
    q_u · dq_u = out_u · do_u        k_u · dk_u = v_u · dv_u

where e is the end of the span of t: the sums are short, so that rounding errors of bf16 products do not accumulate over
the sequence. Nothing of size L · N · P is stored: the backward recomputes the borders. Yang et al. 2023; Dao & Gu 2024.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from regard.kernels.autocast import autocast_like_linear
from regard.kernels.recurrent.linear_scan.sequential import ScanInputs
from regard.kernels.recurrent.linear_scan.triton.kernels import inner_product_kernel, read_kernel, states_kernel
from regard.layout import number_documents

PROGRAMS = 528  # enough for a GPU of 132 multiprocessors; heads of a group are split over programs to reach it


def span_length(key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Tokens per span. A float32 product is three tf32 products, whose operands need more memory: fewer tokens fit."""
    return 32 if dtype == torch.float32 and max(key_dim, value_dim) > 128 else 64


def state_tile(y_dim: int, w_dim: int) -> tuple[int, int, int]:
    """Rows and columns of a state per program, and its warps."""
    return min(y_dim, 128), min(w_dim, 64), 4


def read_tile(w_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns per program, and its warps."""
    return (min(w_dim, 64), 8) if dtype == torch.float32 else (min(w_dim, 128), 4)


def scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """The scan of linear_scan; out has the dtype of k. P is a power of two, or a power of two plus one."""
    v, state = inputs.v, inputs.state
    if v.shape[3] % 2 == 0:
        out, _, last, _ = run_scan(inputs, v, state)
        return out, last
    out, extra_out, last, z = run_scan(inputs, v[..., :-1].contiguous(), state[..., :-1], v[..., -1:], state[..., -1:])
    return torch.cat([out, extra_out.to(out.dtype)], 3), torch.cat([last, z], 3)


def scan_with_total(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of v and of a column of ones (B, H, L, 1), and the last state.

    The state is (B, H, N, P + 1). The column of ones is passed separately: concatenating it to v would copy v and out.
    """
    v, state = inputs.v, inputs.state
    out, total, last, z = run_scan(inputs, v, state[..., :-1], torch.ones_like(v[..., :1]), state[..., -1:])
    return out, total.to(out.dtype), torch.cat([last, z], 3)


def run_scan(
    inputs: ScanInputs, v: Tensor, state: Tensor, extra: Tensor | None = None, z: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan with these values and this state instead of those of the inputs; products have the dtype of k.

    extra (B, H, L, 1) is a further column of the values, z (B, H, N, 1) of the state.
    """
    q, k, _, log_decay, _, segments, valid = inputs
    q, k, v = autocast_like_linear(q, k, v)
    q, v, log_decay = q.to(k.dtype), v.to(k.dtype), None if log_decay is None else log_decay.float()
    if valid is not None:
        k = k * valid[:, None, :, None]
        if log_decay is not None:
            log_decay = (log_decay.view(1, -1, 1) if log_decay.dim() == 1 else log_decay) * valid.unsqueeze(1)
    documents = None if segments is None else number_documents(segments).int()
    extra, z = (None if x is None else x.squeeze(3).float() for x in (extra, z))
    out, extra_out, last, z = scan_op(q, k, v, extra, log_decay, state, z, documents)
    return out, extra_out.unsqueeze(-1), last, z.unsqueeze(-1)


@torch.library.custom_op("regard::scan", mutates_args=())
def scan_op(
    q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, log_decay: Tensor | None, state: Tensor, z: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out (B, H, L, P) and the last state (B, H, N, P); the same for extra (B, H, L) and z (B, H, N), if given."""
    launch = ScanLaunch.of(k, v, log_decay, documents)
    q, k, v = (row_major(x) for x in (q, k, v))
    extra = None if extra is None else extra.contiguous()
    S, last, Z = launch.states(k, v, state, extra, z)
    out, extra_out, _ = launch.read(q, k, v, S, w_extra=extra, state_column=Z)
    if extra_out is None or Z is None or z is None:
        return out, state.new_empty(0), last, state.new_empty(0)
    return out, extra_out, last, Z[:, -1].contiguous().view(z.shape)


@scan_op.register_fake
def _(q, k, v, extra, log_decay, state, z, documents):
    extra_out, last = (state.new_empty(0), state.new_empty(0)) if extra is None else (empty_like(extra), empty_like(z))
    return empty_like(v), extra_out, empty_like(state), last


@torch.library.custom_op("regard::scan_backward", mutates_args=())
def scan_backward(
    q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, log_decay: Tensor | None, state: Tensor, z: Tensor | None,
    documents: Tensor | None, out: Tensor | None, extra_out: Tensor, d_out: Tensor, d_extra_out: Tensor, d_last: Tensor,
    d_z: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of all inputs but the documents; that of log_decay needs `out`."""
    launch = ScanLaunch.of(k, v, log_decay, documents)
    q, k, v, d_out = (row_major(x) for x in (q, k, v, d_out))
    out = None if out is None else out.contiguous()
    w, dw = (None, None) if extra is None else (extra.contiguous(), d_extra_out.contiguous())
    # S and Z: states of v and of the further column; D and E: the gradients of these states.
    S, _, Z = launch.states(k, v, state, w, z)
    D, d_first, E = launch.states(q, d_out, d_last, dw, d_z, reverse=True)
    dq, _, _ = launch.read(d_out, v, k, S, x_extra=dw, y_extra=w, state_row=Z, transposed=True)
    dk, _, _ = launch.read(v, d_out, q, D, x_extra=w, y_extra=dw, state_row=E, transposed=True, reverse=True)
    dv, d_extra, dots = launch.read(
        k, q, d_out, D, reverse=True, w_extra=dw, state_column=E, dots_of=None if out is None else (v, out)
    )
    d_log_decay, d_first_z, border_pairs = state.new_empty(0), state.new_empty(0), [(S, D)]
    if extra is None or d_extra is None or Z is None or E is None or z is None:
        d_extra = state.new_empty(0)
    else:
        d_first_z = E[:, 0].contiguous().view(z.shape)
        border_pairs = [(S, D), (Z, E)]
        dots = None if dots is None else dots + extra_out * d_extra_out - extra * d_extra
    if dots is not None:
        d_log_decay = launch.log_decay_gradient(dots, border_pairs)
        d_log_decay = d_log_decay if log_decay is None or log_decay.dim() == 3 else d_log_decay.sum((0, 2))
    return dq, dk, dv, d_extra, d_log_decay, d_first, d_first_z


@scan_backward.register_fake
def _(q, k, v, extra, log_decay, state, z, documents, out, extra_out, d_out, d_extra_out, d_last, d_z):
    d_extra, d_first_z = (
        (state.new_empty(0), state.new_empty(0)) if extra is None else (empty_like(extra), empty_like(z))
    )
    d_log_decay = state.new_empty(0) if log_decay is None else empty_like(log_decay)
    return empty_like(q), empty_like(k), empty_like(v), d_extra, d_log_decay, empty_like(state), d_first_z


def save_inputs(ctx: Any, inputs: tuple, output: tuple) -> None:
    out, extra_out, _, _ = output
    ctx.save_for_backward(*inputs, None if inputs[4] is None else out, extra_out)


def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them at each access
    extra, log_decay = saved[3:5]
    dq, dk, dv, d_extra, d_log_decay, d_state, d_z = scan_backward(*saved, *d_outputs)
    d_extra, d_z = (None, None) if extra is None else (d_extra, d_z)
    return dq, dk, dv, d_extra, None if log_decay is None else d_log_decay, d_state, d_z, None


scan_op.register_autograd(backward, setup_context=save_inputs)


class ScanLaunch(NamedTuple):
    """The arguments that all passes of a scan share."""

    sums: Tensor | None  # (B, H, spans, span): cumulative log decays from the first token of each span
    documents: Tensor | None  # (B, L)
    batch: int
    heads: int
    length: int
    span: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, log_decay: Tensor | None, documents: Tensor | None) -> "ScanLaunch":
        (batch, heads, length, _), span = v.shape, span_length(k.shape[3], v.shape[3], k.dtype)
        if log_decay is not None:
            log_decay = log_decay.view(1, -1, 1) if log_decay.dim() == 1 else log_decay
            log_decay = split_spans(log_decay.expand(batch, heads, length), span).cumsum(3).contiguous()
        return cls(log_decay, None if documents is None else documents.contiguous(), batch, heads, length, span)

    @property
    def spans(self) -> int:
        return triton.cdiv(self.length, self.span)

    def states(
        self,
        y: Tensor,
        w: Tensor,
        first: Tensor,
        w_extra: Tensor | None = None,
        first_extra: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The states at the borders (B · H, spans + 1, N · P) in the dtype of products, and the last one in float32.

        Also those of the further column, (B · H, spans + 1, N). In reverse they are gradients of the states.
        """
        N, P, heads = y.shape[3], w.shape[3], self.batch * self.heads
        borders = torch.empty(heads, self.spans + 1, N * P, dtype=y.dtype, device=y.device)
        last = torch.empty(self.batch, self.heads, N, P, dtype=torch.float32, device=y.device)
        extra_borders = None if w_extra is None else last.new_empty(heads, self.spans + 1, N)
        rows, columns, warps = state_tile(N, P)
        states_kernel[heads, N // rows, P // columns](
            y, w, w_extra, self.sums, self.documents, first.contiguous(),
            None if first_extra is None else first_extra.contiguous(), borders, extra_borders, last,
            self.strides(y), self.strides(w), self.heads, self.length, self.spans,
            N, P, rows, columns, self.span, reverse, precision(y), num_warps=warps, num_stages=1,
        )  # fmt: skip
        return borders, last, extra_borders

    def read(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        borders: Tensor,
        x_extra: Tensor | None = None,
        y_extra: Tensor | None = None,
        state_row: Tensor | None = None,
        transposed: bool = False,
        reverse: bool = False,
        w_extra: Tensor | None = None,
        state_column: Tensor | None = None,
        dots_of: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """out (B, G, L, P), summed over heads that share w; the output of the further column (B, H, L); dots (B, H, L).

        x_extra, y_extra: a further coordinate of x and y, and state_row its row of the state; w_extra, state_column: a
        further column of w and of the state. `transposed`: the borders hold Sᵀ. For `dots_of` (v, forward_out) the dots
        are forward_out · w - out · v.
        """
        (batch, _, length, N), P = x.shape, w.shape[3]
        groups, summed = min(x.shape[1], w.shape[1]), w.shape[1] < self.heads
        columns, warps = read_tile(P, x.dtype)
        column_blocks, spans = P // columns, batch * self.spans
        head_blocks = groups * divisor_at_least(self.heads // groups, PROGRAMS // (spans * column_blocks * groups))
        out_heads, out_dtype = (head_blocks, torch.float32) if summed else (self.heads, x.dtype)
        out = x.new_empty(batch, out_heads, length, P, dtype=out_dtype)
        extra_out = None if state_column is None else x.new_empty(batch, self.heads, length, dtype=torch.float32)
        v, forward_out = dots_of or (x, None)
        dots = None if dots_of is None else x.new_empty(column_blocks, batch, self.heads, length, dtype=torch.float32)
        read_kernel[spans * head_blocks, column_blocks](
            x, y, w, self.sums, self.documents, borders, x_extra, y_extra, state_row, w_extra, state_column,
            out, extra_out, v, forward_out, dots,
            self.strides(x), self.strides(y), self.strides(w), self.strides(v), (*out.stride()[:3], 1),
            (1, N) if transposed else (P, 1), self.heads, self.length, self.spans,
            N, P, columns, self.span, self.heads // head_blocks, summed, reverse, precision(x),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        out = out.unflatten(1, (groups, -1)).sum(2).to(x.dtype) if summed else out
        return out, extra_out, None if dots is None else dots.sum(0)

    def strides(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.stride(0), x.stride(1), x.stride(2), self.heads // x.shape[1]

    def log_decay_gradient(self, dots: Tensor, borders: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(B, H, L), from q · dq - k · dk (B, H, L) and the borders of states and of their gradients."""
        sums = split_spans(dots, self.span).flip(3).cumsum(3).flip(3)  # (B, H, spans, span)
        for S, D in borders:
            sums = sums + self.inner_products(S, D).view(*sums.shape[:3], 1)
        return sums.flatten(2)[:, :, : self.length].contiguous()

    def inner_products(self, S: Tensor, D: Tensor) -> Tensor:
        """⟨D, S⟩ (B · H, spans) at the ends of spans, of borders (B · H, spans + 1, size)"""
        heads, _, size = S.shape
        result = torch.empty(heads, self.spans, dtype=torch.float32, device=S.device)
        inner_product_kernel[(result.numel(),)](S, D, result, self.spans, size, min(size, 1024))
        return result


def split_spans(x: Tensor, span: int) -> Tensor:
    """(B, H, L) -> (B, H, spans, span), zeros after the last token"""
    return F.pad(x, (0, -x.shape[2] % span)).unflatten(2, (-1, span))


def divisor_at_least(count: int, minimum: int) -> int:
    """The smallest divisor of `count` that is at least `minimum`, or `count`."""
    return next(parts for parts in range(1, count + 1) if count % parts == 0 and parts >= min(minimum, count))


def row_major(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"  # of float32 products; ignored for other dtypes
