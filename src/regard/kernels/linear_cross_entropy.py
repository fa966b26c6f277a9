"""The cross-entropy of a linear head without the logits of all tokens in memory.

    z_t = cap(scale · (W x_t + b))        cap(z) = c · tanh(z / c)        s_t = log Σ_v exp z_tv
    loss = Σ_t w_t (s_t - (1 - ε) z_t,target - ε mean_v z_tv + ζ s_t²)
    dz_t = w_t ((1 + 2 ζ s_t) softmax(z_t) - (1 - ε) onehot(target_t) - ε / V) ⊙ cap' · scale
    dx_t = Wᵀ dz_t        dW = Σ_t dz_t x_tᵀ

ε is the label smoothing (Szegedy et al. 2015), ζ the z-loss, which keeps log Σ exp near 0 (Chowdhery et al. 2022).

The V logits of a token need far more memory than its D inputs. So tokens are processed in chunks, and the gradient of a
chunk is computed in the forward, while its logits exist; the backward only scales it. The number of products is that
of the plain computation. Sums over V run in at least float32.

If the rows of W are distributed over processes (tensor parallelism), each computes the logits of its rows; the largest
logit, Σ exp and the target's logit are combined per chunk, and dx is summed (Shoeybi et al. 2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.compat import cannot_run_triton
from regard.kernels.autocast import autocast_like_linear, without_autocast

CHUNK = 1 << 22  # logits per chunk; at least as many as W has entries, so that additions to dW cost little
GPU_CHUNK = 1 << 28  # half a gigabyte of bfloat16: with 2^22, a GPU spends 5 % of a step on additions to dW


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of W and b in this process, of equally many in each process of the group."""

    group: dist.ProcessGroup
    start: int  # the first row
    vocab: int  # rows in all processes


def linear_cross_entropy(
    x: Tensor,  # (T, D)
    weight: Tensor,  # (V, D), or the rows of a shard
    targets: Tensor,  # (T,)
    weights: Tensor,  # (T,) weight of each token, in at least float32
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,  # tokens per chunk
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,  # coefficient
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ w · loss, and Σ w over the tokens whose target has the highest logit."""
    if weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "weights.requires_grad is not supported by this loss; detach the weights, or use the loss of the logits"
        )
    x, weight, *biases = autocast_like_linear(x, weight, *([] if bias is None else [bias]))
    if chunk_size is None:
        chunk_size = max(x.shape[1], (GPU_CHUNK if x.is_cuda else CHUNK) // len(weight))
    needs_grad = torch.is_grad_enabled() and any(a.requires_grad for a in (x, weight, *biases))
    with without_autocast(x.device):
        bias = biases[0] if biases else None
        options = (scale, softcap, needs_grad, label_smoothing, z_loss)
        return LinearCrossEntropy.apply(x, weight, bias, targets, weights, chunk_size, shard, *options)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        chunk_size: int,
        shard: VocabularyShard | None,
        scale: float,
        softcap: float | None,
        needs_grad: bool,
        label_smoothing: float,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        needed = [needs_grad and need for need in ctx.needs_input_grad[:3]]
        dx = torch.empty_like(x) if needed[0] else None
        dw = torch.zeros_like(weight, dtype=weights.dtype) if needed[1] else None
        db = weights.new_zeros(len(weight)) if needed[2] else None
        sums = weights.new_zeros(2)
        loss_function: Callable = chunk_loss if shard is None else partial(loss_of_shard, shard)
        for start in range(0, len(x), chunk_size):
            chunk = slice(start, start + chunk_size)
            z = F.linear(x[chunk], weight, bias)  # (C, V)
            losses, correct, dz = loss_function(
                z, targets[chunk], weights[chunk], scale, softcap, needs_grad, label_smoothing, z_loss
            )
            sums += torch.stack([losses.sum(), correct.sum()])
            if dx is not None:
                torch.mm(dz, weight, out=dx[chunk])
            if dw is not None:
                add_product(dw, dz.T, x[chunk])
            if db is not None:
                db += dz.sum(0, dtype=db.dtype)
        if shard is not None and dx is not None:
            dist.all_reduce(dx, group=shard.group)
        ctx.save_for_backward(dx, dw, db)
        ctx.dtypes = [None if a is None else a.dtype for a in (x, weight, bias)]
        loss, correct = sums
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            None if g is None else torch.mul(g, d_loss, out=torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, *[None] * 9


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b; the dtype of the total may be wider."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def chunk_loss(z: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`loss_of_logits`, on a GPU as one kernel that writes dz over z."""
    if z.dtype == torch.float64 or cannot_run_triton(z.device) is not None:
        return loss_of_logits(z, *arguments)
    from regard.kernels.triton_cross_entropy import loss_of_logits as kernel

    return *kernel(z, *arguments), z


def loss_of_logits(
    z: Tensor,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    needs_grad: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits z (C, V) before scale and cap -> w · loss (C,), w of correct predictions, else 0 (C,), and dz (C, V).

    A prediction is correct if the target has the highest logit. dz has the dtype of z.
    """
    columns = targets.unsqueeze(-1)  # (C, 1)
    s = z if scale == 1.0 else z.to(weights.dtype) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s.to(weights.dtype) / softcap)
    log_p = s.log_softmax(-1, dtype=weights.dtype)  # (C, V)
    losses = -log_p.gather(-1, columns).squeeze(-1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * log_p.mean(-1)
    log_sum = None if z_loss == 0.0 else s[:, :1].to(weights.dtype) - log_p[:, :1]  # (C, 1)
    if log_sum is not None:
        losses = losses + z_loss * log_sum.squeeze(-1).square()
    losses = losses * weights
    correct = (s.argmax(-1) == targets) * weights
    if not needs_grad:
        return losses, correct, z
    dz = log_p.exp_()
    if log_sum is not None:
        dz *= 1 + 2 * z_loss * log_sum
    dz.scatter_add_(-1, columns, dz.new_full(columns.shape, label_smoothing - 1.0))
    if label_smoothing:
        dz -= label_smoothing / z.shape[-1]
    dz *= scale * weights.unsqueeze(-1)
    if softcap is not None:
        dz *= 1 - (s / softcap).square()
    return losses, correct, dz.to(z.dtype)


def loss_of_shard(
    shard: VocabularyShard,
    z: Tensor,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    needs_grad: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `loss_of_logits`, with the logits z (C, V / processes) of this process, and the dz of these."""
    s = z.to(weights.dtype) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    local = targets - shard.start
    inside = (local >= 0) & (local < z.shape[-1])
    columns = local.where(inside, 0).unsqueeze(-1)  # (C, 1)
    largest, best = s.max(-1)
    top = largest.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, shard.group)
    best = (best + shard.start).where(largest == top, shard.vocab)
    dist.all_reduce(best, dist.ReduceOp.MIN, shard.group)  # the first of equal logits
    p = (s - top.unsqueeze(-1)).exp_()  # (C, V / processes)
    sums = torch.stack([p.sum(-1), s.gather(-1, columns).squeeze(-1).where(inside, 0), s.sum(-1)])  # (3, C)
    dist.all_reduce(sums, group=shard.group)
    total, target, logits = sums
    log_sum = top + total.log()
    losses = log_sum - (1 - label_smoothing) * target - label_smoothing / shard.vocab * logits
    losses = (losses + z_loss * log_sum.square()) * weights
    correct = (best == targets) * weights
    if not needs_grad:
        return losses, correct, z
    dz = p.mul_(((1 + 2 * z_loss * log_sum) / total).unsqueeze(-1)).sub_(label_smoothing / shard.vocab)
    dz.scatter_add_(-1, columns, (label_smoothing - 1.0) * inside.to(dz.dtype).unsqueeze(-1))
    dz *= scale * weights.unsqueeze(-1)
    if softcap is not None:
        dz *= 1 - (s / softcap).square()
    return losses, correct, dz.to(z.dtype)
