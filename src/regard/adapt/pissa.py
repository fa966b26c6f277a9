"""PiSSA: A and B start as the leading singular vectors of the weight (Meng et al. 2024).

    W = U S Vᵀ        A₀ = √(S_r / s) V_rᵀ,   B₀ = U_r √(S_r / s)        s B₀ A₀: the best approximation of rank r

The paper trains A and B beside the residual W − s B₀ A₀. Here W stays as it is, and a layer computes

    y = W x + s (B A − B₀ A₀) x

which is the same function with the same gradients. So the model without its adapters is the original one, bit for bit,
and so is the one at the start. As an adapter of the original weight it has rank 2r: [A; A₀] and [B, −B₀].
Weights are decomposed in at least float32. A randomized SVD (Halko et al. 2009) draws its first vectors at random, so
its matrices differ with the seed.
"""

import re

import torch
from torch import Tensor

INIT = "uniform"
PISSA = "pissa"


def is_initialization(init: str) -> bool:
    """Whether this is a value of `LoRA.init`."""
    return init in (INIT, PISSA) or re.fullmatch(r"pissa_niter_[1-9]\d{0,2}", init) is not None


@torch.no_grad()
def principal_matrices(weight: Tensor, rank: int, scale: float, init: str = PISSA) -> tuple[Tensor, Tensor]:
    """A₀ (…, r, in) and B₀ (…, out, r). init "pissa_niter_N": by a randomized SVD with N subspace iterations."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if init == PISSA:
        u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    else:
        u, s, v = torch.svd_lowrank(wide, rank, niter=int(init.rpartition("_")[2]))
        vh = v.mT
    root = (s[..., :rank] / scale).sqrt()
    a, b = root.unsqueeze(-1) * vh[..., :rank, :], u[..., :rank] * root.unsqueeze(-2)
    return a.to(weight.dtype), b.to(weight.dtype)


def join_initial(a: Tensor, b: Tensor, initial_a: Tensor, initial_b: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of rank 2r whose product is B A − B₀ A₀."""
    return torch.cat([a, initial_a], -2), torch.cat([b, -initial_b], -1)


def from_residual(a: Tensor, b: Tensor, weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A and B that were trained beside the residual, as PEFT does it, as those of rank 2r beside the weight itself."""
    initial_a, initial_b = (matrix.to(a.device) for matrix in principal_matrices(weight, rank, scale))
    return join_initial(a.to(weight.dtype), b.to(weight.dtype), initial_a, initial_b)
