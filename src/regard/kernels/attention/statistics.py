"""What attention does, in O(n) memory: entropy, attention on the first tokens and the top key of every query.

The weights A_ij are never whole. Everything is a sum over the tiles that attention itself goes through (tiled.py), so
it comes out beside the output:

    entropy_i = -Σ_j A_ij log A_ij = lse_i Σ_j A_ij - Σ_j A_ij s_ij        first_i = Σ_{j < first} A_ij
    top key = argmax_j s_ij, of weight exp(max_j s_ij - lse_i)

A head whose entropies fall towards 0 collapses (Zhai et al. 2023); one that rests on the first token has a sink there
(Xiao et al. 2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.at import At
from regard.kernels.attention.online import Part, nothing, part_of
from regard.kernels.attention.reference import per_head
from regard.kernels.attention.scores import Scores
from regard.kernels.attention.tiled import TILE, score, spans, tiles_seen
from regard.kernels.autocast import without_autocast

PIECES = 8  # of a tile of scores, in which the highest is looked for


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of every query (B, H, L); a query that sees no key has zeros and the top key -1."""

    entropy: Tensor  # in nats
    first: Tensor  # the weight of the first tokens of its text
    top_key: Tensor
    top_weight: Tensor
    log_sum: Tensor  # log Σ exp(s)


@torch.no_grad()
def attend_with_statistics(
    q: Tensor, k: Tensor, v: Tensor, at: At, scores: Scores, first: int = 1, tile: tuple[int, int] = TILE
) -> tuple[Tensor, Statistics]:
    """The output (B, H, L, Ev) and its statistics; `first` is how many tokens count as first."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = per_head(k, q), per_head(v, q)
    early = (at.key_positions < first).view(-1, 1, 1, k.shape[2])  # (B, 1, 1, S)
    places = early.flatten(0, -2).any(0).nonzero().squeeze(-1)  # few columns are any row's first keys
    outs, found, tops = [], [], []
    with without_autocast(q.device):
        for rows in spans(q.shape[2], tile[0]):
            q_i = q[:, :, rows].to(wide)
            part = nothing(q_i, v.shape[-1] + 2, scores.sinks)
            best = torch.full_like(part.m, -torch.inf)
            top = torch.full_like(best, -1, dtype=torch.int64)
            for columns, seen in tiles_seen(at, scores, rows, k.shape[2], tile[1]):
                s, _ = score(q_i, k[:, :, columns].to(wide), at, scores, rows, columns, seen)
                peaks = s.unflatten(-1, (PIECES if s.shape[-1] % PIECES == 0 else 1, -1)).amax(-1)  # (B, H, l, pieces)
                peak = peaks.amax(-1, keepdim=True)
                some, p = part_of(s, v[:, :, columns].to(wide), peak)
                risen = ((peak > best) & (some.l > 0)).flatten().nonzero().squeeze(-1)  # fewer in every tile
                top.view(-1)[risen] = highest(s, peaks, risen) + columns.start
                best = torch.maximum(best, peak)
                here = places[(places >= columns.start) & (places < columns.stop)]
                on_first = (p[..., here - columns.start] * early[..., here]).sum(-1, keepdim=True)
                energy = s.mul_(p).sum(-1, keepdim=True)  # Σ_j exp(s_j - m) s_j; s is used up
                part = part.join(Part(some.m, some.l, torch.cat([some.o, energy, on_first], -1)))
            log_sum = part.log_sum()
            mass = (top >= 0).to(wide)  # of all keys together
            if scores.sinks is not None:
                mass = 1 - (scores.sinks.view(1, -1, 1, 1) - log_sum).exp()
            out, energy, on_first = part.out().split([v.shape[-1], 1, 1], -1)
            outs.append(out)
            found.append(torch.cat([log_sum * mass - energy, on_first, (best - log_sum).exp(), log_sum], -1))
            tops.append(top)
    entropy, on_first, weight, log_sum = torch.cat(found, 2).unbind(-1)
    top = torch.cat(tops, 2).squeeze(-1)
    return torch.cat(outs, 2).to(q.dtype), Statistics(entropy, on_first, top, weight, log_sum)


def highest(s: Tensor, peaks: Tensor, rows: Tensor) -> Tensor:
    """Where the highest score of these rows of (…, l, s) stands first; `peaks` (…, l, pieces) has that of each piece.

    PyTorch's argmax reads one number at a time, so it is asked about the peaks, then about one piece.
    """
    pieces = peaks.shape[-1]
    piece = peaks.flatten(0, -2)[rows].argmax(-1)  # (r,)
    inside = s.view(-1, s.shape[-1] // pieces).index_select(0, rows * pieces + piece)  # (r, s / pieces)
    return piece * inside.shape[-1] + inside.argmax(-1)
