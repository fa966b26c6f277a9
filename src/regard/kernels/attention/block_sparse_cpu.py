"""One block layout on a CPU: block after block in plain tensor algebra, in buffers that stay in the cache.

    P = softmax(scale · Q_b K_bᵀ + mask)                 out_b = P V_b
    dV_b = Pᵀ dO_b          dS = P ⊙ (dO_b V_bᵀ - D)     dQ_b = scale · dS K_b      dK_b = scale · dSᵀ Q_b

where D = rowsum(P ⊙ dO_b V_bᵀ), and the gradient of a key is summed over the blocks that attend to it. On a CPU the
first write to new memory costs about as much as the products. So a single run of keys is a view, several runs are
copied into the buffer of the previous block, and the backward recomputes the weights and copies the keys again.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.block_layout import MAX_BLOCK, BlockLayout, DenseBlock, dense_blocks
from regard.kernels.attention.tiled import spans

MIN_SCORES = 3 << 16  # per block: with fewer, the operations on single blocks cost more than one on many blocks
PORTION = 1 << 19  # scores at once: as many heads as stay in the processor's cache

# The additive mask of a block, (K, G·c, keys), and its queries without any key, (G·c, 1); None: nothing to mask.
BlockMasks = Callable[[DenseBlock], tuple[Tensor | None, Tensor | None]]


def is_suitable(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, layout: BlockLayout) -> bool:
    eager = type(q) is Tensor and not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))
    supported = k.shape == v.shape and options.bias is None and not options.dropout and layout.block <= MAX_BLOCK
    on_cpu = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)
    if not (eager and supported and on_cpu):
        return False
    blocks = dense_blocks(layout, q.shape[2])
    return q.shape[1] * sum(block.pairs for block in blocks) >= MIN_SCORES * len(blocks)


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: tuple[DenseBlock, ...], masks: BlockMasks, scale: float) -> Tensor:
    q = q.unflatten(1, (k.shape[1], -1))  # (B, K, G, L, E)
    return BlockSparseFunction.apply(q, k, v, blocks, masks, scale).flatten(1, 2)  # (B, H, L, E)


class BlockSparseFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[DenseBlock, ...], masks: BlockMasks, scale: float
    ) -> Tensor:
        out = q.new_empty(q.movedim(3, 1).shape).movedim(1, 3)  # (B, K, G, L, E) in the memory order (B, L, K, G, E)
        workspace = Workspace(q)
        for row, heads, block in portions(q, blocks):
            q_b = take_run(q[row, heads], block.queries).flatten(1, 2)  # (K, G·c, E): a group's heads are more queries
            k_b, v_b = workspace.gather("k", k[row, heads], block), workspace.gather("v", v[row, heads], block)
            p = block_weights(q_b, k_b, masks(block), heads, scale, workspace)
            write_queries(out[row, heads], block, torch.bmm(p, v_b, out=workspace("q", *q_b.shape)))
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.masks, ctx.scale = blocks, masks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq, d_kv = torch.empty_like(q), k.new_zeros(2, *k.shape)  # dk and dv in one tensor: half as many additions
        workspace, scale = Workspace(q), ctx.scale
        for row, heads, block in portions(q, ctx.blocks):
            q_b, g_b = (take_run(x[row, heads], block.queries).flatten(1, 2) for x in (q, d_out))
            k_b, v_b = workspace.gather("k", k[row, heads], block), workspace.gather("v", v[row, heads], block)
            p = block_weights(q_b, k_b, ctx.masks(block), heads, scale, workspace)
            dk_b, dv_b = d_b = workspace("d", 2, *k_b.shape)
            torch.bmm(p.mT, g_b, out=dv_b)
            ds = torch.bmm(g_b, v_b.mT, out=workspace("ds", *p.shape))
            torch._softmax_backward_data(ds, p, -1, ds.dtype, grad_input=ds)  # dS, in one pass
            write_queries(dq[row, heads], block, scaled_product(ds, k_b, scale, workspace("q", *q_b.shape)))
            scaled_product(ds.mT, q_b, scale, dk_b)
            add_keys(d_kv[:, row, heads], block, d_b)
        return dq, d_kv[0], d_kv[1], None, None, None


class Workspace:
    """Named buffers that every block overwrites."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.buffers = like, {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.buffers or len(self.buffers[name]) < size:
            self.buffers[name] = self.like.new_empty(size)
        return self.buffers[name][:size].view(shape)

    def gather(self, name: str, x: Tensor, block: DenseBlock) -> Tensor:
        """The keys of the block: (K, n, E) -> (K, keys, E)"""
        runs = [take_run(x, run) for run in block.keys]
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs, 1, out=self(name, len(x), sum(map(len, block.keys)), x.shape[2]))


def portions(q: Tensor, blocks: tuple[DenseBlock, ...]) -> Iterator[tuple[int, slice, DenseBlock]]:
    for row in range(len(q)):
        for block in blocks:
            for heads in spans(q.shape[1], max(1, PORTION // (q.shape[2] * block.pairs))):
                yield row, heads, block


def block_weights(
    q: Tensor, k: Tensor, mask: tuple[Tensor | None, Tensor | None], heads: slice, scale: float, workspace: Workspace
) -> Tensor:
    """(K, G·c, E) and (K, keys, E) -> (K, G·c, keys)"""
    additive, without_key = mask
    s = scaled_product(q, k.mT, scale, workspace("s", *q.shape[:2], k.shape[1]))
    if additive is not None:
        s.add_(additive[heads])
    torch.softmax(s, -1, out=s)
    return s if without_key is None else s.masked_fill_(without_key, 0.0)


def scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    """out = scale · a b"""
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def take_run(x: Tensor, run: range) -> Tensor:
    return x[..., run.start : run.stop : run.step, :]


def write_queries(x: Tensor, block: DenseBlock, values: Tensor) -> None:
    """Write the values (K, G·c, E) of the block's queries into x (K, G, n, E)."""
    target = take_run(x, block.queries)
    target.copy_(values.view(target.shape))


def add_keys(total: Tensor, block: DenseBlock, d_keys: Tensor) -> None:
    """Add the gradients (2, K, keys, E) of the block's keys to (2, K, n, E): the adjoint of `Workspace.gather`."""
    for run, part in zip(block.keys, d_keys.split([len(run) for run in block.keys], 2), strict=True):
        take_run(total, run).add_(part)
