"""FlashAttention in PyTorch: attention in tiles of scores, forward and backward, without an n × n matrix.

Forward, for a tile of queries i, over the tiles of keys j that it attends to (merged by online_softmax.py):

    S = cap(scale · Q_i K_jᵀ) + bias        P = exp(S - m)        out_i = Σ_j P V_j / l        lse_i = m + log l

The backward keeps only out and lse, O(n) numbers, and recomputes the weights, with D_i = rowsum(dO_i ⊙ out_i):

    P = exp(S - lse_i)        dV_j += Pᵀ dO_i        dS = P ⊙ (dO_i V_jᵀ - D_i)
    dQ_i += scale · (dS ⊙ cap') K_j      dK_j += scale · (dS ⊙ cap')ᵀ Q_i
    dbias_ij = dS                        dsink = -Σ_i exp(sink - lse_i) D_i

Tiles without any allowed pair are skipped. Dao et al. 2022. The code is plain PyTorch, for reading and for
options that the fused kernels do not have.
"""

from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.attention.arguments import AttentionCall, ScoreOptions
from regard.kernels.attention.mask import allowed_keys
from regard.kernels.attention.online_softmax import PartialSoftmax, empty_partial, exponential, partial_softmax
from regard.kernels.attention.reference import per_head
from regard.kernels.autocast import without_autocast
from regard.layout import Bias, TokenLayout

TILE = (256, 512)  # queries, keys
MIN_SCORES = 1 << 22  # per head: with fewer, the whole matrix is faster than tiles


def unsupported_reason(call: AttentionCall) -> str | None:
    if call.bias is not None and not call.bias.tiles:
        return "tiled needs a bias that is a function of positions"
    return "tiled has no dropout" if call.dropout else None


def slower_reason(call: AttentionCall) -> str | None:
    queries, keys = call.q[2], call.k[2]
    if queries * keys >= MIN_SCORES:
        return None
    if torch.compiler.is_compiling():  # a string with sizes would compile the model again for each of them
        return "tiled would save little"
    return f"tiled would save little: only {queries} × {keys} scores per head"


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions, tile: tuple[int, int] = TILE
) -> Tensor:
    learned = learned_tensors(options.bias).values()
    with without_autocast(q.device):
        return TiledAttention.apply(q, per_head(k, q), per_head(v, q), layout, options, tile, options.sinks, *learned)


class TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TokenLayout,
        options: ScoreOptions,
        tile: tuple[int, int],
        sinks: Tensor | None,
        *learned: Tensor,
    ) -> Tensor:
        empty = empty_partial(widen(q), v.shape[-1], sinks)
        result = accumulate(empty, q, k, v, layout, options, tile)
        out = result.out()
        ctx.save_for_backward(q, k, v, out, result.log_sum(), sinks, *learned)
        ctx.layout, ctx.options, ctx.tile = layout, options, tile
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, sinks, *learned = ctx.saved_tensors
        dq, dk, dv, *d_learned = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v, *learned))
        saved = BackwardInputs(d_out.to(out.dtype), (d_out * out).sum(-1, keepdim=True), log_sum)
        add_gradients(dq, dk, dv, d_learned, saved, q, k, v, ctx.layout, ctx.options, ctx.tile)
        d_inputs = [d.to(x.dtype) for d, x in zip((dq, dk, dv, *d_learned), (q, k, v, *learned), strict=True)]
        return *d_inputs[:3], None, None, None, saved.sink_gradient(sinks), *d_inputs[3:]


def widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def accumulate(
    previous: PartialSoftmax,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    options: ScoreOptions,
    tile: tuple[int, int] = TILE,
) -> PartialSoftmax:
    """Attention over these keys, merged with the previous result of the same queries."""
    results = []
    for rows in spans(q.shape[2], tile[0]):
        q_i, part = widen(q[:, :, rows]), previous.queries(rows)
        for columns, allowed in allowed_tiles(layout, options, rows, k.shape[2], tile[1]):
            s, _ = score(q_i, widen(k[:, :, columns]), layout, options, rows, columns, allowed)
            part = part.merge(partial_softmax(s, widen(v[:, :, columns])))
        results.append(part)
    return PartialSoftmax(*(torch.cat([getattr(part, name) for part in results], 2) for name in ("m", "l", "o")))


class BackwardInputs(NamedTuple):
    """The tensors that the backward of every tile needs besides q, k and v."""

    d_out: Tensor  # (B, H, L, Ev)
    dots: Tensor  # D: (B, H, L, 1)
    log_sum: Tensor  # (B, H, L, 1)

    def sink_gradient(self, sinks: Tensor | None) -> Tensor | None:
        if sinks is None:
            return None
        weights = (sinks.to(self.dots.dtype).view(1, -1, 1, 1) - self.log_sum).exp()
        return -(weights * self.dots).sum((0, 2, 3)).to(sinks.dtype)


def add_gradients(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_learned: list[Tensor],
    saved: BackwardInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    options: ScoreOptions,
    tile: tuple[int, int] = TILE,
) -> None:
    """Add the gradients of attention of these queries to these keys to dq, dk, dv and d_learned, in place."""
    d_out, dots, log_sum = saved
    for rows in spans(q.shape[2], tile[0]):
        q_i, g_i = widen(q[:, :, rows]), d_out[:, :, rows]
        for columns, allowed in allowed_tiles(layout, options, rows, k.shape[2], tile[1]):
            k_j, v_j = widen(k[:, :, columns]), widen(v[:, :, columns])
            s, cap_derivative = score(q_i, k_j, layout, options, rows, columns, allowed)
            p = exponential(s - log_sum[:, :, rows])  # (B, H, l, s)
            ds = p * (g_i @ v_j.transpose(-1, -2) - dots[:, :, rows])
            dv[:, :, columns] += p.transpose(-1, -2) @ g_i
            for total, d in zip(d_learned, bias_gradients(ds, layout, options.bias, rows, columns), strict=True):
                total += d
            ds = ds * options.scale if cap_derivative is None else ds * cap_derivative * options.scale
            dq[:, :, rows] += ds @ k_j
            dk[:, :, columns] += ds.transpose(-1, -2) @ q_i


def spans(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def allowed_tiles(
    layout: TokenLayout, options: ScoreOptions, rows: slice, length: int, size: int
) -> Iterator[tuple[slice, Tensor | None]]:
    """The tiles of keys with an allowed pair, and the allowed pairs (B or 1, 1, l, s); None: all pairs."""
    batch = slice(0, 1) if layout.ordered else slice(None)  # in an ordered layout all rows have the same mask
    for columns in spans(length, size):
        allowed = allowed_keys(options.mask, layout, rows, columns, batch)
        if allowed is None or allowed.all():
            yield columns, None
        elif allowed.any():
            yield columns, allowed.unsqueeze(1)


def score(
    q: Tensor,
    k: Tensor,
    layout: TokenLayout,
    options: ScoreOptions,
    rows: slice,
    columns: slice,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """One tile of scores (B, H, l, s), and the derivative of the cap there."""
    s, cap_derivative = (q * options.scale) @ k.transpose(-1, -2), None
    if options.softcap is not None:
        tanh = torch.tanh(s / options.softcap)
        s, cap_derivative = options.softcap * tanh, 1 - tanh * tanh
    if options.bias is not None:
        s = s + options.bias.tile(layout.positions[:, rows], layout.key_positions[:, columns], s.dtype)
    return s if allowed is None else s.masked_fill(~allowed, torch.finfo(s.dtype).min), cap_derivative


def learned_tensors(bias: Bias | None) -> dict[str, Tensor]:
    """The tensors of a bias that require gradients."""
    fields = {} if bias is None else vars(bias)
    return {name: x for name, x in fields.items() if isinstance(x, Tensor) and x.requires_grad}


def bias_gradients(
    ds: Tensor, layout: TokenLayout, bias: Bias | None, rows: slice, columns: slice
) -> tuple[Tensor, ...]:
    """The gradients of the learned tensors of the bias, from dS of a tile: recompute the tile and differentiate it."""
    learned = {name: x.detach().requires_grad_() for name, x in learned_tensors(bias).items()}
    if bias is None or not learned:
        return ()
    clone = copy(bias)
    vars(clone).update(learned)
    with torch.enable_grad():
        tile = clone.tile(layout.positions[:, rows], layout.key_positions[:, columns], ds.dtype)
        return torch.autograd.grad(tile, list(learned.values()), ds.sum_to_size(tile.shape))
