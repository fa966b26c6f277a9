"""The scan on GPUs: spans of tokens in parallel, in Triton. Forward, three kernels:

    add      what every span adds to the state, as if it began with none        (passes.py)
    carry    the states at the borders of spans                                 (kernels/carry.py)
    read     what every token reads: of the border's state, and of its own span (passes.py)

With D_t = ∂loss/∂S_t, D_t = q_t do_tᵀ + exp(decay_{t+1}) D_{t+1}, a scan from the end, the gradients are reads as well:

    dq_t = S_t do_t       reads (do, v, k)
    dk_t = D_t v_t        reads backwards (v, do, q)
    dv_t = D_tᵀ k_t       reads backwards (k, q, do)
    ddecay_t = ⟨D_t, S_t - k_t v_tᵀ⟩ = ⟨D_e, S_e⟩ + Σ_{t≤u≤e} (q_u · dq_u - k_u · dk_u)

where e is the end of t's span: sums stay short, so that the rounding of bf16 products does not pile up over a text.
Nothing of size L · N · P is kept: borders are made again in the backward. Yang et al. 2023; Dao & Gu 2024.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from regard.kernels.autocast import autocast_like_linear
from regard.kernels.carry import carry
from regard.kernels.scan.passes import add_kernel, read_kernel
from regard.kernels.segments import numbered

SPANS = (512, 256, 128)  # tokens
PROGRAMS = 264  # that keep a GPU of 132 multiprocessors busy


class Tiles(NamedTuple):
    chunk: int  # tokens
    block: int  # columns of w
    warps: int


def add_tiles(y_dim: int, w_dim: int, dtype: torch.dtype) -> Tiles:
    return Tiles(16 if dtype == torch.float32 else 64, min(w_dim, 64), 4)


def read_tiles(x_dim: int, w_dim: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:  # each product is three of tf32, and each operand three: registers are short
        return Tiles(16, min(w_dim, 32 if x_dim > 128 else 64), 8)
    return Tiles(64, min(w_dim, 64 if x_dim > 64 else 128), 4)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As kernels/scan says; out has the dtype of k. P is a power of two, or one more than it."""
    columns = v.shape[3]
    if columns % 2 == 0:
        out, _, last, _ = run(q, k, v, None, decay, state, None, segments, valid)
        return out, last
    v, extra = v[..., :-1], v[..., -1:]
    out, more, last, z = run(q, k, v.contiguous(), extra, decay, state[..., :-1], state[..., -1:], segments, valid)
    return torch.cat([out, more.to(out.dtype)], 3), torch.cat([last, z], 3)


def scan_with_total(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan of v and of a column of ones behind it, whose reading is the second output (B, H, L, 1).

    The state is (B, H, N, P + 1). That v and out stay as they are saves four copies of them.
    """
    ones = torch.ones_like(v[..., :1])
    out, total, last, z = run(q, k, v, ones, decay, state[..., :-1], state[..., -1:], segments, valid)
    return out, total.to(out.dtype), torch.cat([last, z], 3)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Tensor | None,
    decay: Tensor | None,
    state: Tensor,
    z: Tensor | None,
    segments: Tensor | None,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """extra (B, H, L, 1) is one more column of values, z (B, H, N, 1) of the state. Products are in the keys' dtype."""
    q, k, v = autocast_like_linear(q, k, v)
    q, v, decay = q.to(k.dtype), v.to(k.dtype), None if decay is None else decay.float()
    if valid is not None:
        k = k * valid[:, None, :, None]
        if decay is not None:
            decay = (decay.view(1, -1, 1) if decay.dim() == 1 else decay) * valid.unsqueeze(1)
    docs = None if segments is None else numbered(segments).int()
    extra, z = (None if x is None else x.squeeze(3).float() for x in (extra, z))
    out, more, last, z = scan_op(q, k, v, extra, decay, state, z, docs)
    return out, more.unsqueeze(-1), last, z.unsqueeze(-1)


@torch.library.custom_op("regard::scan", mutates_args=())
def scan_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Tensor | None,
    decay: Tensor | None,
    state: Tensor,
    z: Tensor | None,
    docs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (B, H, L, P) and the last state (B, H, N, P); the same of extra (B, H, L) and z (B, H, N), if given."""
    case = Case.of(v, decay, docs)
    q, k, v = (row_major(x) for x in (q, k, v))
    extra = None if extra is None else extra.contiguous()
    S, Z = case.borders(k, v, state, extra, z)
    out, _, more = case.read(q, k, v, S, w_more=extra, tail=Z)
    last = case.end(S, state)
    if more is None or Z is None or z is None:
        return out, state.new_empty(0), last, state.new_empty(0)
    return out, more, last, case.end(Z, z)


@scan_op.register_fake
def _(q, k, v, extra, decay, state, z, docs):
    more, last = (state.new_empty(0), state.new_empty(0)) if extra is None else (dense(extra), dense(z))
    return dense(v), more, dense(state), last


@torch.library.custom_op("regard::scan_backward", mutates_args=())
def scan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Tensor | None,
    decay: Tensor | None,
    state: Tensor,
    z: Tensor | None,
    docs: Tensor | None,
    d_out: Tensor,
    d_more: Tensor,
    d_last: Tensor,
    d_z: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    case = Case.of(v, decay, docs)
    q, k, v, d_out = (row_major(x) for x in (q, k, v, d_out))
    x, y = (None, None) if extra is None else (d_more.contiguous(), extra.contiguous())
    S, Z = case.borders(k, v, state, y, z)
    D, E = case.borders(q, d_out, d_last, x, d_z, reverse=True)
    own_q, own_k = (None, None) if decay is None else (q, k)
    dq, q_dots, _ = case.read(d_out, v, k, S, x, y, Z, turned=True, own=own_q)
    dk, k_dots, _ = case.read(v, d_out, q, D, y, x, E, turned=True, reverse=True, own=own_k)
    dv, _, d_extra = case.read(k, q, d_out, D, reverse=True, w_more=x, tail=E)
    d_decay, d_first = state.new_empty(0), case.end(D, state, reverse=True)
    if q_dots is not None and k_dots is not None:
        d_decay = case.decay_gradient(q_dots - k_dots, [(S, D)] if Z is None or E is None else [(S, D), (Z, E)])
    if d_extra is None or E is None or z is None:
        d_extra, d_first_z = state.new_empty(0), state.new_empty(0)
    else:
        d_first_z = case.end(E, z, reverse=True)
    return per_group(dq, q), per_group(dk, k), dv, d_extra, d_decay, d_first, d_first_z


@scan_backward.register_fake
def _(q, k, v, extra, decay, state, z, docs, d_out, d_more, d_last, d_z):
    d_extra, d_first_z = (state.new_empty(0), state.new_empty(0)) if extra is None else (dense(extra), dense(z))
    d_decay = state.new_empty(0) if decay is None else dense(decay)
    return dense(q), dense(k), dense(v), d_extra, d_decay, dense(state), d_first_z


def remember(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    extra, decay = ctx.saved_tensors[3:5]
    dq, dk, dv, d_extra, d_decay, d_state, d_z = scan_backward(*ctx.saved_tensors, *d_outputs)
    d_extra, d_z = (None, None) if extra is None else (d_extra, d_z)
    return dq, dk, dv, d_extra, None if decay is None else d_decay, d_state, d_z, None


scan_op.register_autograd(backward, setup_context=remember)


class Case(NamedTuple):
    """One scan: what all its passes share."""

    decay: Tensor | None  # (H,) or (B, H, L)
    docs: Tensor | None  # (B, L)
    batch: int
    heads: int
    length: int
    span: int

    @classmethod
    def of(cls, v: Tensor, decay: Tensor | None, docs: Tensor | None) -> "Case":
        batch, heads, length, _ = v.shape
        enough = (span for span in SPANS if batch * heads * triton.cdiv(length, span) >= PROGRAMS)
        decay = None if decay is None else decay.contiguous()
        docs = None if docs is None else docs.contiguous()
        return cls(decay, docs, batch, heads, length, next(enough, SPANS[-1]))

    @property
    def spans(self) -> int:
        return triton.cdiv(self.length, self.span)

    @property
    def per_token(self) -> bool:
        return self.decay is not None and self.decay.dim() == 3

    def borders(
        self,
        y: Tensor,
        w: Tensor,
        first: Tensor,
        w_more: Tensor | None = None,
        first_more: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(B · H, spans + 1, N · P): the states between spans, beginning with the first one (or the last).

        And, of one column more, (B · H, spans + 1, N).
        """
        N, P, rows = y.shape[3], w.shape[3], self.batch * self.heads
        added = torch.empty(rows, self.spans, N * P, dtype=torch.float32, device=y.device)
        faded = torch.empty(rows, self.spans, 1, dtype=torch.float32, device=y.device)
        more = None if w_more is None else added.new_empty(rows, self.spans, N)
        chunk, block, warps = add_tiles(N, P, y.dtype)
        add_kernel[rows * self.spans, P // block](
            y, w, w_more, self.decay, self.docs, added, more, faded, self.strides(y), self.strides(w),
            self.heads, self.length, self.spans, N, P, block, chunk, self.span, reverse, self.per_token, precision(y),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        states = carry(added, faded, None, first.reshape(rows, -1).contiguous(), reverse)
        if more is None or first_more is None:
            return states, None
        return states, carry(more, faded, None, first_more.reshape(rows, -1).contiguous(), reverse)

    def end(self, borders: Tensor, like: Tensor, reverse: bool = False) -> Tensor:
        """The last state, or from the end the first."""
        return borders[:, 0 if reverse else -1].view(like.shape).clone()

    def read(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        borders: Tensor,
        x_more: Tensor | None = None,
        y_more: Tensor | None = None,
        column: Tensor | None = None,
        turned: bool = False,
        reverse: bool = False,
        own: Tensor | None = None,
        w_more: Tensor | None = None,
        tail: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """out (B, H, L, P), out · own (B, H, L), what is read of the tail (B, H, L); `turned`: the borders hold Sᵀ."""
        N, P, shape = x.shape[3], w.shape[3], (self.batch, self.heads, self.length)
        chunk, block, warps = read_tiles(N, P, x.dtype)
        out = torch.empty(*shape, P, dtype=x.dtype, device=x.device)
        dots = None if own is None else torch.empty(P // block, *shape, dtype=torch.float32, device=x.device)
        more = None if tail is None else torch.empty(shape, dtype=torch.float32, device=x.device)
        read_kernel[self.batch * self.heads * self.spans, P // block](
            x, y, w, own, self.decay, self.docs, borders, x_more, y_more, column, w_more, tail, out, more, dots,
            self.strides(x), self.strides(y), self.strides(w), self.strides(x if own is None else own),
            self.strides(out), (1, N) if turned else (P, 1),
            self.heads, self.length, self.spans, N, P, block, chunk, self.span, reverse, self.per_token,
            precision(x), num_warps=warps, num_stages=1,
        )  # fmt: skip
        return out, None if dots is None else dots.sum(0), more

    def strides(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.stride(0), x.stride(1), x.stride(2), self.heads // x.shape[1]

    def decay_gradient(self, dots: Tensor, borders: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Of `decay`, from q · dq - k · dk (B, H, L) and the borders of states and of their gradients."""
        dots = F.pad(dots, (0, self.spans * self.span - self.length)).unflatten(2, (self.spans, self.span))
        later = dots.flip(3).cumsum(3).flip(3)  # (B, H, spans, span)
        for S, D in borders:
            later = later + torch.einsum("rsm,rsm->rs", S[:, 1:], D[:, 1:]).view(*dots.shape[:3], 1)
        steps = later.flatten(2)[:, :, : self.length]
        return steps if self.per_token else steps.sum((0, 2))


def row_major(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def per_group(x: Tensor, like: Tensor) -> Tensor:
    """Gradients (B, H, L, N) of what groups of heads share, summed to (B, G, L, N)."""
    return x if x.shape[1] == like.shape[1] else x.unflatten(1, (like.shape[1], -1)).sum(2)


def precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"  # of products of float32; others have no choice
