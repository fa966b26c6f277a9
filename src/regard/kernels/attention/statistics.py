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

from regard.kernels.attention.online_softmax import PartialSoftmax, nothing
from regard.kernels.attention.reference import per_head
from regard.kernels.attention.running_argmax import RunningArgmax
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.attention.tiled import TILE, score, spans, tiles_seen
from regard.kernels.autocast import without_autocast
from regard.layout import TokenLayout

PIECES = 8  # of a tile of scores, in which the highest is looked for (highest.py)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    scores: ScoreOptions,
    first: int = 1,
    tile: tuple[int, int] = TILE,
) -> tuple[Tensor, Statistics]:
    """The output (B, H, L, Ev) and its statistics; `first` is how many tokens count as first."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = per_head(k, q), per_head(v, q)
    early = (layout.key_positions < first).view(-1, 1, 1, k.shape[2])  # (B, 1, 1, S)
    places = early.flatten(0, -2).any(0).nonzero().squeeze(-1).tolist()  # few columns are any row's first keys
    outs, found, tops = [], [], []
    with without_autocast(q.device):
        for rows in spans(q.shape[2], tile[0]):
            q_i = q[:, :, rows].to(wide)
            part = nothing(q_i, v.shape[-1], scores.sinks)
            none, one = torch.zeros_like(part.l), torch.ones_like(part.l)
            part = PartialSoftmax(
                part.m, torch.stack([part.l, none, none]), part.o
            )  # Σ p, Σ p s, Σ_first p for p = exp(s - m)
            highest = RunningArgmax(q_i, max(1, tile[1] // PIECES))
            for columns, seen in tiles_seen(layout, scores, rows, k.shape[2], tile[1]):
                s, _ = score(q_i, k[:, :, columns].to(wide), layout, scores, rows, columns, seen)
                peak, p = highest.look(s, columns.start), s.softmax(-1)
                on_first = none
                if here := [place for place in places if columns.start <= place < columns.stop]:
                    there = [place - columns.start for place in here]
                    on_first = (p[..., there] * early[..., here]).sum(-1, keepdim=True)
                log_sum = peak - p.amax(-1, keepdim=True).log()  # of this tile; p = exp(s - log_sum), whose sum is 1
                some = log_sum, torch.stack([one, dots(p, s), on_first]), p @ v[:, :, columns].to(wide)
                if seen is not None:  # a query may have seen none of these keys
                    lowest = torch.finfo(wide).min / 2
                    some = (x.where(peak > lowest, empty) for x, empty in zip(some, (lowest, 0.0, 0.0), strict=True))
                part = part.join(PartialSoftmax(*some))
                del s, p, some  # the next tile takes their place in the cache
            total, energy, on_first = part.l
            part = PartialSoftmax(part.m, total, part.o)
            log_sum, top = part.log_sum(), highest.key()
            mass = (top >= 0).to(wide)  # of all keys together
            if scores.sinks is not None:
                mass = 1 - (scores.sinks.view(1, -1, 1, 1) - log_sum).exp()
            outs.append(part.out())
            energy, on_first = (x / total.where(total > 0, 1.0) for x in (energy, on_first))
            found.append(torch.cat([log_sum * mass - energy, on_first, (highest.score - log_sum).exp(), log_sum], -1))
            tops.append(top)
    entropy, on_first, weight, log_sum = torch.cat(found, 2).unbind(-1)
    top = torch.cat(tops, 2).squeeze(-1)
    return torch.cat(outs, 2).to(q.dtype), Statistics(entropy, on_first, top, weight, log_sum)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Σ_j a_j b_j, (…, 1): rows times columns, which reads both once and writes no product of theirs."""
    rows, columns = (x.flatten(0, -2).unsqueeze(1) for x in (a, b))
    return torch.bmm(rows, columns.transpose(1, 2)).view(*a.shape[:-1], 1)
