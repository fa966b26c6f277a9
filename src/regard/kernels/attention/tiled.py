"""Flash attention on paper: attention in tiles of scores, forward and backward, without ever holding an n × n matrix.

Forward, for a tile of queries i, over the tiles of keys j that it can see (online.py joins them):

    S = cap(scale · Q_i K_jᵀ) + bias        P = exp(S - m)        out_i = Σ_j P V_j / l        lse_i = m + log l

Backward keeps only out and lse, O(n) numbers, and makes the weights again from them, with D_i = rowsum(dO_i ⊙ out_i):

    P = exp(S - lse_i)        dV_j += Pᵀ dO_i        dS = P ⊙ (dO_i V_jᵀ - D_i)
    dQ_i += scale · (dS ⊙ cap') K_j      dK_j += scale · (dS ⊙ cap')ᵀ Q_i
    dbias_ij = dS                        dsink = -Σ_i exp(sink - lse_i) D_i

Tiles of which no pair is seen are skipped. Dao et al. 2022, FlashAttention. It is here to be read; PyTorch's kernels do
the same in one pass near the processor.
"""

from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.attention.bias import Bias
from regard.kernels.attention.mask import both
from regard.kernels.attention.online_softmax import PartialSoftmax, exponential, nothing, part_of
from regard.kernels.attention.reference import per_head
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.autocast import without_autocast
from regard.layout import TokenLayout

TILE = (256, 512)  # queries, keys
WORTH = 1 << 22  # scores a head, from which a matrix of them costs more than going through tiles


def refuses(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    if scores.bias is not None and not scores.bias.tiles:
        return "tiled needs a bias that positions alone decide"
    return "tiled cannot drop weights" if scores.dropout else None


def slower(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    few = q.shape[2] * k.shape[2] < WORTH
    return f"tiled would save little: {q.shape[2]} × {k.shape[2]} scores a head are few" if few else None


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions, tile: tuple[int, int] = TILE
) -> Tensor:
    learned = learned_of(scores.bias).values()
    with without_autocast(q.device):
        return TiledAttention.apply(q, per_head(k, q), per_head(v, q), layout, scores, tile, scores.sinks, *learned)


class TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TokenLayout,
        scores: ScoreOptions,
        tile: tuple[int, int],
        sinks: Tensor | None,
        *learned: Tensor,
    ) -> Tensor:
        part = read(nothing(wide(q), v.shape[-1], sinks), q, k, v, layout, scores, tile)
        out = part.out()
        ctx.save_for_backward(q, k, v, out, part.log_sum(), sinks, *learned)
        ctx.layout, ctx.scores, ctx.tile = layout, scores, tile
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, sinks, *learned = ctx.saved_tensors
        dq, dk, dv, *d_learned = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v, *learned))
        given = Given(d_out.to(out.dtype), (d_out * out).sum(-1, keepdim=True), log_sum)
        add_gradients(dq, dk, dv, d_learned, given, q, k, v, ctx.layout, ctx.scores, ctx.tile)
        d_inputs = [d.to(x.dtype) for d, x in zip((dq, dk, dv, *d_learned), (q, k, v, *learned), strict=True)]
        return *d_inputs[:3], None, None, None, given.of_sinks(sinks), *d_inputs[3:]


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def read(
    before: PartialSoftmax,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    scores: ScoreOptions,
    tile: tuple[int, int] = TILE,
) -> PartialSoftmax:
    """What all queries have read, behind what they had before these keys."""
    parts = []
    for rows in spans(q.shape[2], tile[0]):
        q_i, part = wide(q[:, :, rows]), before.of(rows)
        for columns, seen in tiles_seen(layout, scores, rows, k.shape[2], tile[1]):
            s, _ = score(q_i, wide(k[:, :, columns]), layout, scores, rows, columns, seen)
            part = part.join(part_of(s, wide(v[:, :, columns])))
        parts.append(part)
    return PartialSoftmax(*(torch.cat([getattr(part, name) for part in parts], 2) for name in ("m", "l", "o")))


class Given(NamedTuple):
    """What the backward of every tile is made from, besides its inputs."""

    d_out: Tensor  # (B, H, L, Ev)
    dots: Tensor  # D: (B, H, L, 1)
    log_sum: Tensor  # (B, H, L, 1)

    def of_sinks(self, sinks: Tensor | None) -> Tensor | None:
        """The sinks' gradient."""
        if sinks is None:
            return None
        shares = (sinks.to(self.dots.dtype).view(1, -1, 1, 1) - self.log_sum).exp()
        return -(shares * self.dots).sum((0, 2, 3)).to(sinks.dtype)


def add_gradients(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_learned: list[Tensor],
    given: Given,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    scores: ScoreOptions,
    tile: tuple[int, int] = TILE,
) -> None:
    """Add to them what these queries and these keys have to do with each other."""
    d_out, dots, log_sum = given
    for rows in spans(q.shape[2], tile[0]):
        q_i, g_i = wide(q[:, :, rows]), d_out[:, :, rows]
        for columns, seen in tiles_seen(layout, scores, rows, k.shape[2], tile[1]):
            k_j, v_j = wide(k[:, :, columns]), wide(v[:, :, columns])
            s, slope = score(q_i, k_j, layout, scores, rows, columns, seen)
            p = exponential(s - log_sum[:, :, rows])  # (B, H, l, s)
            ds = p * (g_i @ v_j.transpose(-1, -2) - dots[:, :, rows])
            dv[:, :, columns] += p.transpose(-1, -2) @ g_i
            for total, d in zip(d_learned, bias_gradients(ds, layout, scores.bias, rows, columns), strict=True):
                total += d
            ds = ds * scores.scale if slope is None else ds * slope * scores.scale
            dq[:, :, rows] += ds @ k_j
            dk[:, :, columns] += ds.transpose(-1, -2) @ q_i


def spans(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def tiles_seen(
    layout: TokenLayout, scores: ScoreOptions, rows: slice, length: int, size: int
) -> Iterator[tuple[slice, Tensor | None]]:
    """The spans of keys of which these queries see any, and which pairs (B or 1, 1, l, s) are seen; None: all."""
    few = slice(0, 1) if layout.ordered else slice(None)  # whole texts are alike
    q_at, k_at = layout.positions[few, rows].unsqueeze(-1), layout.key_positions[few].unsqueeze(-2)
    for columns in spans(length, size):
        seen = scores.mask.allows(q_at, k_at[..., columns])
        if layout.segments is not None and layout.key_segments is not None:
            seen = both(seen, layout.segments[:, rows].unsqueeze(-1) == layout.key_segments[:, columns].unsqueeze(-2))
        if layout.key_valid is not None:
            seen = both(seen, layout.key_valid[:, columns].unsqueeze(-2))
        if seen is None or seen.all():
            yield columns, None
        elif seen.any():
            yield columns, seen.unsqueeze(1)


def score(
    q: Tensor, k: Tensor, layout: TokenLayout, scores: ScoreOptions, rows: slice, columns: slice, seen: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """One tile of scores (B, H, l, s), and the cap's derivative there."""
    s, slope = (q * scores.scale) @ k.transpose(-1, -2), None
    if scores.softcap is not None:
        tanh = torch.tanh(s / scores.softcap)
        s, slope = scores.softcap * tanh, 1 - tanh * tanh
    if scores.bias is not None:
        s = s + scores.bias.tile(layout.positions[:, rows], layout.key_positions[:, columns], s.dtype)
    return s if seen is None else s.masked_fill(~seen, torch.finfo(s.dtype).min), slope


def learned_of(bias: Bias | None) -> dict[str, Tensor]:
    """The tensors of a bias that want gradients."""
    held = {} if bias is None else vars(bias)
    return {name: x for name, x in held.items() if isinstance(x, Tensor) and x.requires_grad}


def bias_gradients(
    ds: Tensor, layout: TokenLayout, bias: Bias | None, rows: slice, columns: slice
) -> tuple[Tensor, ...]:
    """What a tile's dS gives to each learned tensor of the bias: the tile is made once more and differentiated."""
    learned = {name: x.detach().requires_grad_() for name, x in learned_of(bias).items()}
    if bias is None or not learned:
        return ()
    again = copy(bias)
    vars(again).update(learned)
    with torch.enable_grad():
        tile = again.tile(layout.positions[:, rows], layout.key_positions[:, columns], ds.dtype)
        return torch.autograd.grad(tile, list(learned.values()), ds.sum_to_size(tile.shape))
