"""The selective scan in chunks: only the recurrence runs token by token, the other operations for a whole chunk.

    parallel   a_t = exp(Δ_t A)      b_t = Δ_t u_t B_t
    serial     h_t = a_t ⊙ h_{t-1} + b_t          one fused multiply-add per token
    parallel   y_t = C_t · h_t

The L · F · N states are never all stored: only those of one chunk, in a workspace that stays in the processor's cache,
and the one before each chunk. The backward recomputes the states of a chunk from the one before it, and runs the
adjoint recurrence from the end, with g_t = ∂loss/∂h_t:

    g_t = C_t dy_t + a_{t+1} ⊙ g_{t+1}      db_t = g_t      d(Δ_t A) = g_t ⊙ h_{t-1} ⊙ a_t      dC_t = h_t · dy_t

So training too takes O(L · F) memory. The layout of states is (…, N, F): all inner loops run over channels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.autocast import without_autocast
from regard.kernels.recurrent.selective_scan.sequential import SelectiveScanInputs

WORKSPACE = 1 << 20  # numbers per tensor of a chunk: 4 MB in float32


def unsupported_reason(inputs: SelectiveScanInputs) -> str | None:
    return None


def selective_scan(inputs: SelectiveScanInputs, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C = inputs.in_state_dtype()
    D, state, segments = inputs.D, inputs.state, inputs.segments
    same_document = None if segments is None else continues_document(segments)
    with without_autocast(u.device):
        y, last = Chunked.apply(u, delta, A, B, C, state, same_document, chunk or chunk_size(state))
    return y if D is None else y.addcmul(u, D.to(y.dtype)), last


def chunk_size(state: Tensor) -> int:
    """Tokens per chunk: at least N, so that the states before the chunks take no more memory than u."""
    return max(state.shape[2], WORKSPACE // max(1, state.numel()))


def continues_document(segments: Tensor) -> Tensor:
    """(B, L): whether the previous token is of the same document; True for the first, which continues the state."""
    same = segments[:, 1:] == segments[:, :-1]
    return torch.cat([torch.ones_like(segments[:, :1], dtype=torch.bool), same], 1)


class Chunk(NamedTuple):
    """The tensors of T tokens, time first."""

    u: Tensor  # (T, B, F)
    delta: Tensor
    B: Tensor  # (T, B, N)
    C: Tensor
    same_document: Tensor | None  # (T, B)


class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        state: Tensor,
        same_document: Tensor | None,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        chunks = split_chunks((u, delta, B, C), same_document, size)
        A_t, h = A.t().contiguous(), state.mT.contiguous()  # (N, F), (B, N, F)
        a, hs = workspace(2, chunks[0], h)
        ys, starts = [], []
        for chunk in chunks:
            starts.append(h)
            count = len(chunk.u)
            unroll(chunk, A_t, h, a[:count], hs[:count])
            h = hs[count - 1].clone()
            ys.append((chunk.C.unsqueeze(2) @ hs[:count]).squeeze(2))  # (T, B, F)
        ctx.save_for_backward(u, delta, A, B, C, same_document, *starts)
        ctx.size = size
        return torch.cat(ys).transpose(0, 1), h.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        u, delta, A, B, C, same_document, *starts = ctx.saved_tensors
        chunks, A_t = split_chunks((u, delta, B, C), same_document, ctx.size), A.t().contiguous()
        du, d_delta, dB, dC = (torch.empty_like(x.transpose(0, 1)) for x in (u, delta, B, C))  # (L, B, …)
        dA, carried = torch.zeros_like(A_t), d_last.mT.contiguous()  # (B, N, F)
        dy = dy.transpose(0, 1)
        a, hs, g = workspace(3, chunks[0], carried)
        for i in reversed(range(len(chunks))):
            chunk, count = chunks[i], len(chunks[i].u)
            tokens = slice(i * ctx.size, i * ctx.size + count)
            unroll(chunk, A_t, starts[i], a[:count], hs[:count])
            dC[tokens] = (hs[:count] @ dy[tokens].unsqueeze(3)).squeeze(3)
            adjoint(chunk, dy[tokens], carried, a[:count], g[:count])
            carried = a[0] * g[0]
            d_input = (chunk.B.unsqueeze(2) @ g[:count]).squeeze(2)  # (T, B, F) of Δ u
            dB[tokens] = (g[:count] @ (chunk.delta * chunk.u).unsqueeze(3)).squeeze(3)
            d_decay = a[:count].mul_(g[:count])  # (T, B, N, F) of Δ A
            d_decay[0] *= starts[i]
            d_decay[1:] *= hs[: count - 1]
            dA += (d_decay * chunk.delta.unsqueeze(2)).sum((0, 1))
            du[tokens] = d_input * chunk.delta
            d_delta[tokens] = d_decay.mul_(A_t).sum(2).addcmul_(d_input, chunk.u)
        du, d_delta, dB, dC = (x.transpose(0, 1) for x in (du, d_delta, dB, dC))
        return du, d_delta, dA.t(), dB, dC, carried.mT, None, None


def split_chunks(tokens: tuple[Tensor, ...], same_document: Tensor | None, size: int) -> list[Chunk]:
    """(B, L, …) tensors -> chunks of this many tokens."""
    chunks = []
    for start in range(0, tokens[0].shape[1], size):
        u, delta, B, C = (x[:, start : start + size].transpose(0, 1) for x in tokens)
        same = None if same_document is None else same_document[:, start : start + size].t()
        chunks.append(Chunk(u, delta, B, C, same))
    return chunks


def workspace(count: int, chunk: Chunk, h: Tensor) -> Tensor:
    return h.new_empty(count, len(chunk.u), *h.shape)


def unroll(chunk: Chunk, A_t: Tensor, h: Tensor, a: Tensor, hs: Tensor) -> None:
    """Fill a and hs (T, B, N, F) with the decay of every token and the state after it."""
    torch.mul(chunk.delta.unsqueeze(2), A_t, out=a).exp_()
    if chunk.same_document is not None:
        a *= chunk.same_document[..., None, None]
    torch.mul((chunk.delta * chunk.u).unsqueeze(2), chunk.B.unsqueeze(3), out=hs)
    for decay, state in zip(a.unbind(), hs.unbind(), strict=True):
        h = state.addcmul_(decay, h)


def adjoint(chunk: Chunk, dy: Tensor, carried: Tensor, a: Tensor, g: Tensor) -> None:
    """Fill g (T, B, N, F) with the gradients of the states; `carried` is the gradient from the next chunk."""
    torch.mul(dy.unsqueeze(2), chunk.C.unsqueeze(3), out=g)
    g[-1] += carried
    steps = g.unbind()
    for t in reversed(range(len(steps) - 1)):
        steps[t].addcmul_(a[t + 1], steps[t + 1])
