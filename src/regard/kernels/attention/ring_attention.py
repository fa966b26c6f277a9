"""Ring attention: a sequence is split over processes, and the keys and values are passed around a ring.

    process r:   result ← empty       R times:  result ← merge(result, attention(q_r, k, v))        k, v ← previous rank

The merge is that of online softmax (online_softmax.py), so the result is exact, and no process holds more than two
shares of the keys. The backward passes the keys around the ring again, together with their accumulated gradients, which
return to their process after R steps. The next share is transferred while the current one is processed. Liu et al.
2023.

Under a causal mask the process with the last tokens would compute the most pairs. `zigzag_shares` assigns one
chunk from the front and one from the end to each process, so that all compute equally many pairs, as in striped
attention (Brandon et al. 2023).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.kernels.attention.online_softmax import empty_partial
from regard.kernels.attention.reference import per_head
from regard.kernels.attention.tiled import (
    BackwardInputs,
    accumulate,
    add_gradients,
    learned_tensors,
    unsupported_reason,
    widen,
)
from regard.kernels.autocast import without_autocast
from regard.layout import TokenLayout


def zigzag_shares(length: int, processes: int) -> Tensor:
    """(R, length / R): the token indices of each process."""
    if length % (2 * processes):
        raise ValueError(f"length={length} is not divisible by {2 * processes}; pad the sequence to a multiple of it")
    front, end = torch.arange(length).unflatten(0, (2, processes, -1))  # (R, length / 2R)
    return torch.cat([front, end.flip(0)], 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    options: ScoreOptions,
    group: "dist.ProcessGroup | None" = None,
) -> Tensor:
    """Attention of the tokens of this process to those of all processes; all shares have the same length.

    Arguments are those of every attention backend.
    """
    reason = unsupported_reason(describe(q, k, v, layout, options))
    if layout.keys is not None:
        reason = "the keys must be the queries' own tokens, not those of a cache or a source"
    if reason is not None:
        raise ValueError(f"ring attention: {reason}; gather the sequence on one process and use another backend")
    with without_autocast(q.device):
        return RingAttention.apply(
            q, k, v, layout, options, group, options.sinks, *learned_tensors(options.bias).values()
        )


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TokenLayout,
        options: ScoreOptions,
        group: "dist.ProcessGroup | None",
        sinks: Tensor | None,
        *learned: Tensor,
    ) -> Tensor:
        result = empty_partial(widen(q), v.shape[-1], sinks)
        for keys, values, key_layout in rotate_keys(k, v, layout, group):
            result = accumulate(result, q, per_head(keys, q), per_head(values, q), key_layout, options)
        out = result.out()
        ctx.save_for_backward(q, k, v, out, result.log_sum(), sinks, *learned)
        ctx.layout, ctx.options, ctx.group = layout, options, group
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, sinks, *learned = ctx.saved_tensors
        dq, dk, dv, *d_learned = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v, *learned))
        saved = BackwardInputs(d_out.to(out.dtype), (d_out * out).sum(-1, keepdim=True), log_sum)
        for keys, values, key_layout in rotate_keys(k, v, ctx.layout, ctx.group):
            keys, values = per_head(keys, q), per_head(values, q)
            d_keys, d_values = (torch.zeros_like(x, dtype=out.dtype) for x in (keys, values))  # (B, H, S, E)
            add_gradients(dq, d_keys, d_values, d_learned, saved, q, keys, values, key_layout, ctx.options)
            dk, dv = dk + sum_per_kv_head(d_keys, dk), dv + sum_per_kv_head(d_values, dv)
            dk, dv = wait(send_to_next([dk, dv], ctx.group))
        d_inputs = [d.to(x.dtype) for d, x in zip((dq, dk, dv, *d_learned), (q, k, v, *learned), strict=True)]
        return *d_inputs[:3], None, None, None, saved.sink_gradient(sinks), *d_inputs[3:]


def sum_per_kv_head(x: Tensor, like: Tensor) -> Tensor:
    """(B, H, S, E) -> (B, K, S, E): summed over the query heads of each kv head."""
    return x.unflatten(1, (like.shape[1], -1)).sum(2)


def rotate_keys(
    k: Tensor, v: Tensor, layout: TokenLayout, group: "dist.ProcessGroup | None"
) -> Iterator[tuple[Tensor, Tensor, TokenLayout]]:
    """The keys and values of every process, this one first, and the layout of the local queries with these keys."""
    names = [name for name in ("positions", "segments", "valid") if getattr(layout, name) is not None]
    share = [k, v, *(getattr(layout, name) for name in names)]
    for step in range(dist.get_world_size(group)):
        transfer = send_to_next(share, group) if step + 1 < dist.get_world_size(group) else None
        k, v, *others = share
        keys: dict[str, Any] = dict(zip(names, others, strict=True))
        yield k, v, layout.with_keys(**keys)
        if transfer is not None:
            share = wait(transfer)


Transfer = tuple[list[Tensor], list["dist.Work"], list[Tensor]]


def send_to_next(tensors: Sequence[Tensor], group: "dist.ProcessGroup | None") -> Transfer:
    """Start to send tensors to the next process and to receive those of the previous one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    directions = ((dist.isend, sent, (rank + 1) % size), (dist.irecv, received, (rank - 1) % size))
    work = [
        dist.P2POp(operation, x, group=group, group_peer=peer, tag=tag)
        for operation, tensors, peer in directions
        for tag, x in enumerate(tensors)
    ]
    return received, dist.batch_isend_irecv(work), sent  # keeps `sent` alive during the transfer


def wait(transfer: Transfer) -> list[Tensor]:
    received, works, _ = transfer
    for work in works:
        work.wait()
    return received
