"""Attention statistics in O(n) memory: entropy, weight on the first tokens, and top key of every query.

The weights A_ij are never stored as a matrix. All statistics are sums over the tiles of tiled.py, computed together
with the output:

    entropy_i = -Σ_j A_ij log A_ij = lse_i Σ_j A_ij - Σ_j A_ij s_ij        first_weight_i = Σ_{j < first_tokens} A_ij
    top key = argmax_j s_ij, of weight exp(max_j s_ij - lse_i)

A head whose entropies approach 0 collapses (Zhai et al. 2023); one with most of its weight on the first token has an
attention sink there (Xiao et al. 2023).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.online_softmax import PartialSoftmax, empty_partial
from regard.kernels.attention.reference import per_head
from regard.kernels.attention.tiled import TILE, allowed_tiles, score, spans
from regard.kernels.autocast import without_autocast
from regard.layout import TokenLayout

CHUNKS = 8  # per tile of scores, for RunningArgmax


@dataclass(frozen=True, eq=False)
class Statistics:
    """Per query, (B, H, L); zeros and top key -1 for a query without any allowed key."""

    entropy: Tensor  # in nats
    first_weight: Tensor  # total weight on the first tokens of the document
    top_key: Tensor
    top_weight: Tensor
    log_sum: Tensor  # log Σ exp(s)


@torch.no_grad()
def attend_with_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    options: ScoreOptions,
    first_tokens: int = 1,
    tile: tuple[int, int] = TILE,
) -> tuple[Tensor, Statistics]:
    """The output (B, H, L, Ev) and its statistics; `first_tokens` is the number of tokens that count as first."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = per_head(k, q), per_head(v, q)
    is_first = (layout.key_positions < first_tokens).view(-1, 1, 1, k.shape[2])  # (B, 1, 1, S)
    first_slots = is_first.flatten(0, -2).any(0).nonzero().squeeze(-1).tolist()  # the few columns to sum
    outs, statistics, top_keys = [], [], []
    with without_autocast(q.device):
        for rows in spans(q.shape[2], tile[0]):
            q_i = q[:, :, rows].to(wide)
            part = empty_partial(q_i, v.shape[-1], options.sinks)
            zeros, ones = torch.zeros_like(part.l), torch.ones_like(part.l)
            # l holds Σ p, Σ p s and Σ_first p for p = exp(s - m).
            part = PartialSoftmax(part.m, torch.stack([part.l, zeros, zeros]), part.o)
            argmax = RunningArgmax(q_i, max(1, tile[1] // CHUNKS))
            for columns, allowed in allowed_tiles(layout, options, rows, k.shape[2], tile[1]):
                s, _ = score(q_i, k[:, :, columns].to(wide), layout, options, rows, columns, allowed)
                peak, p = argmax.update(s, columns.start), s.softmax(-1)
                on_first = zeros
                if slots := [slot for slot in first_slots if columns.start <= slot < columns.stop]:
                    in_tile = [slot - columns.start for slot in slots]
                    on_first = (p[..., in_tile] * is_first[..., slots]).sum(-1, keepdim=True)
                log_sum = peak - p.amax(-1, keepdim=True).log()  # of this tile; p = exp(s - log_sum), whose sum is 1
                partial = log_sum, torch.stack([ones, dots(p, s), on_first]), p @ v[:, :, columns].to(wide)
                if allowed is not None:  # a query may attend to none of these keys
                    lowest = torch.finfo(wide).min / 2
                    partial = (
                        x.where(peak > lowest, empty) for x, empty in zip(partial, (lowest, 0.0, 0.0), strict=True)
                    )
                part = part.merge(PartialSoftmax(*partial))
                del s, p, partial  # the next tile reuses their memory, which is in the cache
            total, energy, on_first = part.l
            part = PartialSoftmax(part.m, total, part.o)
            log_sum, top_key = part.log_sum(), argmax.key()
            mass = (top_key >= 0).to(wide)  # total weight of all keys
            if options.sinks is not None:
                mass = 1 - (options.sinks.view(1, -1, 1, 1) - log_sum).exp()
            outs.append(part.out())
            energy, on_first = (x / total.where(total > 0, 1.0) for x in (energy, on_first))
            statistics.append(
                torch.cat([log_sum * mass - energy, on_first, (argmax.score - log_sum).exp(), log_sum], -1)
            )
            top_keys.append(top_key)
    entropy, on_first, weight, log_sum = torch.cat(statistics, 2).unbind(-1)
    top_key = torch.cat(top_keys, 2).squeeze(-1)
    return torch.cat(outs, 2).to(q.dtype), Statistics(entropy, on_first, top_key, weight, log_sum)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Σ_j a_j b_j, (…, 1), as a batched matrix product: no product tensor is written."""
    rows, columns = (x.flatten(0, -2).unsqueeze(1) for x in (a, b))
    return torch.bmm(rows, columns.transpose(1, 2)).view(*a.shape[:-1], 1)


class RunningArgmax:
    """The highest score of every query and the slot of its key, over tiles of scores; the first of equal scores.

    PyTorch's argmax is not vectorized, amax is. So `update` takes the maxima of a few chunks per tile and keeps the
    chunk with the maximum only for rows whose maximum has risen, which become fewer with every tile. The argmax inside
    the chunk is computed once at the end.
    """

    def __init__(self, q: Tensor, width: int) -> None:
        self.score = q.new_full((*q.shape[:-1], 1), torch.finfo(q.dtype).min / 2)  # (B, H, l, 1)
        self.start = torch.full((self.score.numel(),), -1, device=q.device)
        self.chunk = q.new_zeros(len(self.start), width)

    def update(self, s: Tensor, start: int) -> Tensor:
        """Take a tile (B, H, l, s) whose first key is in slot `start`; returns the maximum of each of its rows."""
        width = self.chunk.shape[-1]
        if padding := -s.shape[-1] % width:
            s = F.pad(s, (0, padding), value=torch.finfo(s.dtype).min)
        chunks = s.unflatten(-1, (-1, width))  # (B, H, l, chunks, width)
        peaks = chunks.amax(-1)
        peak = peaks.amax(-1, keepdim=True)
        risen = (peak > self.score).flatten().nonzero().squeeze(-1)
        best_chunk = peaks.flatten(0, -2).index_select(0, risen).max(-1).indices
        self.chunk.index_copy_(0, risen, chunks.flatten(0, -2).index_select(0, risen * peaks.shape[-1] + best_chunk))
        self.start.index_copy_(0, risen, best_chunk * width + start)
        self.score = torch.maximum(self.score, peak)
        return peak

    def key(self) -> Tensor:
        """(B, H, l, 1) slots; -1 for a query without any allowed key."""
        return torch.where(self.start < 0, -1, self.start + self.chunk.max(-1).indices).view(self.score.shape)
