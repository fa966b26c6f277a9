"""Ring attention: a text split over processes, whose keys and values go round until every query has met them all.

    process r:   part ← nothing        R times:  part ← part ∘ (q_r before k, v)        k, v ← the neighbour's

∘ joins parts of a softmax (online.py), so the result is exact, and no process ever holds more than two shares of keys.
Backwards keys go round again, with the gradients that they have gathered so far, which are home after R steps. While a
share is read, the next one is already on its way. Liu et al. 2023.

Under a causal mask a process with the last tokens would have the most to do. `shares` gives each one piece from the
front and one from the end, so that all have the same number of pairs (Brandon et al. 2023, striped; zigzag).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.attention.online_softmax import nothing
from regard.kernels.attention.reference import per_head
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.attention.tiled import Given, add_gradients, learned_of, read, refuses, wide
from regard.kernels.autocast import without_autocast
from regard.layout import TokenLayout


def shares(length: int, processes: int) -> Tensor:
    """(R, length / R): which places of a text each process takes."""
    if length % (2 * processes):
        raise ValueError(f"{length} tokens do not split into {2 * processes} pieces; pad to a multiple of that")
    front, end = torch.arange(length).unflatten(0, (2, processes, -1))  # (R, length / 2R)
    return torch.cat([front, end.flip(0)], 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions, group: "dist.ProcessGroup | None" = None
) -> Tensor:
    """As kernels/attention says, of this process's tokens before those of all; every process has as many of them."""
    reason = refuses(q, k, v, layout, scores)
    if layout.keys is not None:
        reason = "its keys are its queries' own tokens; here others stand in front"
    if reason is not None:
        raise ValueError(f"ring attention: {reason}")
    with without_autocast(q.device):
        return RingAttention.apply(q, k, v, layout, scores, group, scores.sinks, *learned_of(scores.bias).values())


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TokenLayout,
        scores: ScoreOptions,
        group: "dist.ProcessGroup | None",
        sinks: Tensor | None,
        *learned: Tensor,
    ) -> Tensor:
        part = nothing(wide(q), v.shape[-1], sinks)
        for keys, values, before in round_the_ring(k, v, layout, group):
            part = read(part, q, per_head(keys, q), per_head(values, q), before, scores)
        out = part.out()
        ctx.save_for_backward(q, k, v, out, part.log_sum(), sinks, *learned)
        ctx.layout, ctx.scores, ctx.group = layout, scores, group
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, sinks, *learned = ctx.saved_tensors
        dq, dk, dv, *d_learned = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v, *learned))
        given = Given(d_out.to(out.dtype), (d_out * out).sum(-1, keepdim=True), log_sum)
        for keys, values, before in round_the_ring(k, v, ctx.layout, ctx.group):
            keys, values = per_head(keys, q), per_head(values, q)
            d_keys, d_values = (torch.zeros_like(x, dtype=out.dtype) for x in (keys, values))  # (B, H, S, E)
            add_gradients(dq, d_keys, d_values, d_learned, given, q, keys, values, before, ctx.scores)
            dk, dv = dk + per_kv_head(d_keys, dk), dv + per_kv_head(d_values, dv)
            dk, dv = arrived(passed_on([dk, dv], ctx.group))
        d_inputs = [d.to(x.dtype) for d, x in zip((dq, dk, dv, *d_learned), (q, k, v, *learned), strict=True)]
        return *d_inputs[:3], None, None, None, given.of_sinks(sinks), *d_inputs[3:]


def per_kv_head(x: Tensor, like: Tensor) -> Tensor:
    """(B, H, S, E) -> (B, K, S, E): summed over the heads that share keys."""
    return x.unflatten(1, (like.shape[1], -1)).sum(2)


def round_the_ring(
    k: Tensor, v: Tensor, layout: TokenLayout, group: "dist.ProcessGroup | None"
) -> Iterator[tuple[Tensor, Tensor, TokenLayout]]:
    """Every process's keys and values, this one's first, and where its tokens stand before them."""
    names = [name for name in ("positions", "segments", "valid") if getattr(layout, name) is not None]
    share = [k, v, *(getattr(layout, name) for name in names)]
    for step in range(dist.get_world_size(group)):
        coming = passed_on(share, group) if step + 1 < dist.get_world_size(group) else None
        k, v, *others = share
        yield k, v, layout.with_keys(**dict(zip(names, others, strict=True)))
        if coming is not None:
            share = arrived(coming)


Coming = tuple[list[Tensor], list["dist.Work"], list[Tensor]]


def passed_on(tensors: Sequence[Tensor], group: "dist.ProcessGroup | None") -> Coming:
    """Send them to the next process, and begin to receive the last one's."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    ways = ((dist.isend, sent, (rank + 1) % size), (dist.irecv, received, (rank - 1) % size))
    work = [
        dist.P2POp(way, x, group=group, group_peer=peer, tag=tag)
        for way, some, peer in ways
        for tag, x in enumerate(some)
    ]
    return received, dist.batch_isend_irecv(work), sent  # kept until they have left


def arrived(coming: Coming) -> list[Tensor]:
    received, works, _ = coming
    for work in works:
        work.wait()
    return received
