"""The loss of a linear head that never holds the logits of all its tokens.

    z_t = cap(scale · (W x_t + b))        loss = Σ_t w_t (log Σ_v exp z_tv - z_t,target)        cap(z) = c · tanh(z / c)
    dz_t = w_t (softmax(z_t) - onehot(target_t)) ⊙ cap' · scale        dx_t = Wᵀ dz_t        dW = Σ_t dz_t x_tᵀ

A token's V logits are far more numbers than the D that they are made of. So tokens come in chunks, and a chunk's part
of the gradient is computed while its logits are there; backward has only to scale it. It costs no product more than
the plain way. Sums over V run in at least float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.compat import cannot_triton
from regard.kernels.autocast import autocast_like_linear, without_autocast

CHUNK = 1 << 22  # logits in a chunk, or as many as the table has numbers: then adding up its gradient costs little


def linear_cross_entropy(
    x: Tensor,  # (T, D)
    weight: Tensor,  # (V, D)
    targets: Tensor,  # (T,)
    weights: Tensor,  # (T,) how much a token counts, in at least float32
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    tokens: int | None = None,  # in a chunk
) -> tuple[Tensor, Tensor]:
    """The sums over tokens of w · loss, and of w where the target has the highest logit."""
    if weights.requires_grad and torch.is_grad_enabled():
        raise ValueError("the weights of tokens get no gradient here; detach them, or take the loss of the logits")
    x, weight, *biases = autocast_like_linear(x, weight, *([] if bias is None else [bias]))
    tokens = max(x.shape[1], CHUNK // len(weight)) if tokens is None else tokens
    learns = torch.is_grad_enabled() and any(a.requires_grad for a in (x, weight, *biases))
    with without_autocast(x.device):
        bias = biases[0] if biases else None
        return LinearCrossEntropy.apply(x, weight, bias, targets, weights, scale, softcap, tokens, learns)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        scale: float,
        softcap: float | None,
        tokens: int,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        needed = [learns and need for need in ctx.needs_input_grad[:3]]
        dx = torch.empty_like(x) if needed[0] else None
        dw = torch.zeros_like(weight, dtype=weights.dtype) if needed[1] else None
        db = weights.new_zeros(len(weight)) if needed[2] else None
        sums = weights.new_zeros(2)
        for start in range(0, len(x), tokens):
            part = slice(start, start + tokens)
            z = F.linear(x[part], weight, bias)  # (C, V)
            losses, correct, dz = by_rows(z, targets[part], weights[part], scale, softcap, learns)
            sums += torch.stack([losses.sum(), correct.sum()])
            if dx is not None:
                torch.mm(dz, weight, out=dx[part])
            if dw is not None:
                add_product(dw, dz.T, x[part])
            if db is not None:
                db += dz.sum(0, dtype=db.dtype)
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
        return *gradients, *[None] * 6


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where the total may be wider than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def by_rows(z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`of_logits`, by one kernel where there is a GPU; it puts dz where z was."""
    if z.dtype == torch.float64 or cannot_triton(z.device) is not None:
        return of_logits(z, *rest)
    from regard.kernels.triton_cross_entropy import of_logits as kernel

    return *kernel(z, *rest), z


def of_logits(
    z: Tensor, targets: Tensor, weights: Tensor, scale: float, softcap: float | None, learns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of products z (C, V): w · loss (C,), w where the target is the highest (C,), and dz, in the dtype of z."""
    places = targets.unsqueeze(-1)  # (C, 1)
    s = z if scale == 1.0 else z.to(weights.dtype) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s.to(weights.dtype) / softcap)
    log_p = s.log_softmax(-1, dtype=weights.dtype)  # (C, V)
    losses = -log_p.gather(-1, places).squeeze(-1) * weights
    correct = (s.argmax(-1) == targets) * weights
    if not learns:
        return losses, correct, z
    dz = log_p.exp_()
    dz.scatter_add_(-1, places, dz.new_full(places.shape, -1.0))
    dz *= scale * weights.unsqueeze(-1)
    if softcap is not None:
        dz *= 1 - (s / softcap).square()
    return losses, correct, dz.to(z.dtype)
