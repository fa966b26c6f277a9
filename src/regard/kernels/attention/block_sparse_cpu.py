"""One fold on a CPU: block after block in plain algebra, through memory that stays near the processor.

    P = softmax(scale · Q_b K_bᵀ + mask)                 out_b = P V_b
    dV_b = Pᵀ dO_b          dS = P ⊙ (dO_b V_bᵀ - D)     dQ_b = scale · dS K_b      dK_b = scale · dSᵀ Q_b

where D = rowsum(P ⊙ dO_b V_bᵀ), and the gradient of a key is the sum over the blocks that see it. To touch fresh memory
costs a CPU about as much as the products. So one run of keys is a view, several are laid side by side where those of
the block before lay, and the backward keeps neither weights nor keys of blocks: it makes both again.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.attention.block_layout import LONGEST, BlockLayout, DenseBlock, blocks_of
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.attention.tiled import spans

WORTH = 3 << 16  # scores of a block, from which a dozen operations on it are better than few on many blocks together
PORTION = 1 << 19  # scores at once: as many heads as stay near the processor

# What is added to the scores of a block, (K, G·c, keys), and its queries that see nothing, (G·c, 1); None: nothing.
Seen = Callable[[DenseBlock], tuple[Tensor | None, Tensor | None]]


def suits(q: Tensor, k: Tensor, v: Tensor, scores: ScoreOptions, fold: BlockLayout) -> bool:
    eager = type(q) is Tensor and not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))
    plain = k.shape == v.shape and scores.bias is None and not scores.dropout and fold.block <= LONGEST
    here = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)
    if not (eager and plain and here):
        return False
    blocks = blocks_of(fold, q.shape[2])
    return q.shape[1] * sum(block.pairs for block in blocks) >= WORTH * len(blocks)


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: tuple[DenseBlock, ...], seen: Seen, scale: float) -> Tensor:
    q = q.unflatten(1, (k.shape[1], -1))  # (B, K, G, L, E)
    return BlockSparseFunction.apply(q, k, v, blocks, seen, scale).flatten(1, 2)  # (B, H, L, E)


class BlockSparseFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[DenseBlock, ...], seen: Seen, scale: float
    ) -> Tensor:
        out = q.new_empty(q.movedim(3, 1).shape).movedim(1, 3)  # token after token, as the layers behind want it
        room = Workspace(q)
        for row, heads, block in portions(q, blocks):
            q_b = along(q[row, heads], block.queries).flatten(1, 2)  # (K, G·c, E): a group's heads are more queries
            k_b, v_b = room.lay("k", k[row, heads], block), room.lay("v", v[row, heads], block)  # (K, keys, E)
            p = weights(q_b, k_b, seen(block), heads, scale, room)
            place(out[row, heads], block, torch.bmm(p, v_b, out=room("q", *q_b.shape)))
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.seen, ctx.scale = blocks, seen, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq, d = torch.empty_like(q), k.new_zeros(2, *k.shape)  # dk and dv in one: half as many additions
        room, scale = Workspace(q), ctx.scale
        for row, heads, block in portions(q, ctx.blocks):
            q_b, g_b = (along(x[row, heads], block.queries).flatten(1, 2) for x in (q, d_out))
            k_b, v_b = room.lay("k", k[row, heads], block), room.lay("v", v[row, heads], block)
            p = weights(q_b, k_b, ctx.seen(block), heads, scale, room)
            dk_b, dv_b = d_b = room("d", 2, *k_b.shape)
            torch.bmm(p.mT, g_b, out=dv_b)
            ds = torch.bmm(g_b, v_b.mT, out=room("ds", *p.shape))
            torch._softmax_backward_data(ds, p, -1, ds.dtype, grad_input=ds)  # dS, in one pass
            place(dq[row, heads], block, scaled(ds, k_b, scale, room("q", *q_b.shape)))
            scaled(ds.mT, q_b, scale, dk_b)
            add(d[:, row, heads], block, d_b)
        return dq, d[0], d[1], None, None, None


class Workspace:
    """Memory by name: what one block has left there, the next one writes over."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.held = like, {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.held or len(self.held[name]) < size:
            self.held[name] = self.like.new_empty(size)
        return self.held[name][:size].view(shape)

    def lay(self, name: str, x: Tensor, block: DenseBlock) -> Tensor:
        """The block's keys, (K, n, E) -> (K, keys, E)"""
        runs = [along(x, run) for run in block.keys]
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs, 1, out=self(name, len(x), sum(map(len, block.keys)), x.shape[2]))


def portions(q: Tensor, blocks: tuple[DenseBlock, ...]) -> Iterator[tuple[int, slice, DenseBlock]]:
    for row in range(len(q)):
        for block in blocks:
            for heads in spans(q.shape[1], max(1, PORTION // (q.shape[2] * block.pairs))):
                yield row, heads, block


def weights(
    q: Tensor, k: Tensor, seen: tuple[Tensor | None, Tensor | None], heads: slice, scale: float, room: Workspace
) -> Tensor:
    """(K, G·c, E) and (K, keys, E) -> (K, G·c, keys)"""
    s, (extra, blind) = scaled(q, k.mT, scale, room("s", *q.shape[:2], k.shape[1])), seen
    if extra is not None:
        s.add_(extra[heads])
    torch.softmax(s, -1, out=s)
    return s if blind is None else s.masked_fill_(blind, 0.0)


def scaled(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    """out = scale · a b"""
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def along(x: Tensor, run: range) -> Tensor:
    return x[..., run.start : run.stop : run.step, :]


def place(x: Tensor, block: DenseBlock, found: Tensor) -> None:
    """Of the block's queries, (K, G·c, E) into (K, G, n, E)"""
    here = along(x, block.queries)
    here.copy_(found.view(here.shape))


def add(total: Tensor, block: DenseBlock, d: Tensor) -> None:
    """Of the block's keys, (2, K, keys, E) onto (2, K, n, E): `Room.lay`, the other way."""
    for run, piece in zip(block.keys, d.split([len(run) for run in block.keys], 2), strict=True):
        along(total, run).add_(piece)
