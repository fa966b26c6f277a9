"""`loss_of_logits` of linear_cross_entropy.py as one Triton kernel, which overwrites the logits with their gradient.

A program reads its row twice: once for the maximum and Σ exp (online, per lane, merged at the end), once to write the
gradient; the second time the row is still in the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
BLOCK = 4096


@triton.jit
def scale_and_cap(z, scale, cap, CAP: tl.constexpr):
    s = z.to(tl.float32) * scale
    if CAP:
        s = cap * (1 - 2 / (1 + tl.exp2(s * (2 * LOG2E / cap))))  # tanh
    return s


@triton.jit
def row_loss(
    z, targets, weights, losses, correct, row_stride, vocab, scale, cap, smoothing, z_loss,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, NEEDS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z += row * row_stride
    target, weight = tl.load(targets + row), tl.load(weights + row)
    lanes = tl.arange(0, BLOCK)
    running_max, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    argmax, score_sum = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        v = start + lanes
        s = scale_and_cap(tl.load(z + v, mask=v < vocab, other=0.0), scale, cap, CAP) * LOG2E
        if SMOOTH:
            score_sum += tl.where(v < vocab, s, 0.0)
        s = tl.where(v < vocab, s, -2e30)
        argmax = tl.where(s > running_max, v, argmax)
        new_max = tl.maximum(running_max, s)
        total = total * tl.exp2(running_max - new_max) + tl.exp2(s - new_max)
        running_max = new_max
    row_max = tl.max(running_max, 0)
    log_sum = row_max + tl.log2(tl.sum(total * tl.exp2(running_max - row_max), 0))
    predicted = tl.min(tl.where(running_max == row_max, argmax, vocab), 0)
    target_score = scale_and_cap(tl.load(z + target), scale, cap, CAP) * LOG2E
    loss = (log_sum - (1 - smoothing) * target_score) / LOG2E
    if SMOOTH:
        loss -= smoothing * tl.sum(score_sum, 0) / vocab / LOG2E
    natural_log_sum = log_sum / LOG2E
    tl.store(losses + row, (loss + z_loss * natural_log_sum * natural_log_sum) * weight)
    tl.store(correct + row, tl.where(predicted == target, weight, 0.0))
    if NEEDS_GRAD:
        tl.debug_barrier()  # all lanes have read the logit of the target before it is overwritten
        for start in range(0, vocab, BLOCK):
            v = start + lanes
            s = scale_and_cap(tl.load(z + v, mask=v < vocab, other=0.0), scale, cap, CAP)
            dz = tl.exp2(s * LOG2E - log_sum) * (1 + 2 * z_loss * natural_log_sum)
            dz = (dz - tl.where(v == target, 1 - smoothing, 0.0) - smoothing / vocab) * (weight * scale)
            if CAP:
                dz *= 1 - (s / cap) * (s / cap)
            tl.store(z + v, dz.to(z.dtype.element_ty), mask=v < vocab)


@torch.library.custom_op("regard::loss_of_logits", mutates_args=("z",))
def loss_of_logits(
    z: Tensor,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    needs_grad: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """w · loss (C,), and w where the target has the highest logit, else 0 (C,).

    needs_grad: overwrite z (C, V) with its gradient.
    """
    losses, correct = torch.empty_like(weights), torch.empty_like(weights)
    row_loss[(len(z),)](
        z, targets, weights, losses, correct, z.stride(0), z.shape[1], scale, softcap or 1.0,
        label_smoothing, z_loss, CAP=softcap is not None, SMOOTH=label_smoothing > 0, NEEDS_GRAD=needs_grad,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return losses, correct


@loss_of_logits.register_fake
def _(z, targets, weights, *options) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weights), torch.empty_like(weights)
