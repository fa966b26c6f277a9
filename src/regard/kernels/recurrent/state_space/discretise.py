"""Discretisation: x' = Ax + Bu, y = Cx becomes x_t = Ā x_{t-1} + B̄ u_t, y_t = C x_t.

    zero-order hold    Ā = exp(ΔA)                        B̄ = A⁻¹(Ā - I) B         exact if u is constant between steps
    bilinear           Ā = (I - ΔA/2)⁻¹ (I + ΔA/2)        B̄ = (I - ΔA/2)⁻¹ ΔB      Tustin; error O(Δ²)

Both keep a stable system stable: if all Re λ(A) < 0, then all |λ(Ā)| < 1. The step Δ is one number per channel; a
signal at half the speed needs half the step. Gu et al. 2021, section 2.3.
"""

import torch
from torch import Tensor

from regard.kernels.recurrent.state_space.transition import DiagonalTransition, LowRankTransition


def zero_order_hold(A: Tensor, B: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """A (N, N), B (N,) -> Ā, B̄. A may be singular: exp(Δ [[A, B], [0, 0]]) = [[Ā, B̄], [0, 1]]."""
    size = len(B)
    augmented = torch.zeros(size + 1, size + 1, dtype=A.dtype, device=A.device)
    augmented[:size, :size], augmented[:size, size] = A, B
    exp = torch.linalg.matrix_exp(step * augmented)
    return exp[:size, :size], exp[:size, size]


def bilinear(A: Tensor, B: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """A (N, N), B (N,) -> Ā, B̄"""
    identity, half = torch.eye(len(B), dtype=A.dtype, device=A.device), step / 2 * A
    solved = torch.linalg.solve(identity - half, torch.cat([identity + half, step * B.unsqueeze(-1)], 1))
    return solved[:, :-1], solved[:, -1]


def zero_order_hold_diagonal(values: Tensor, B: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and B (D, N) complex, step (D, 1) -> Ā and B̄ (D, N)."""
    A_bar = (step * values).exp()
    return A_bar, (A_bar - 1) / values * B


def bilinear_diagonal(values: Tensor, B: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    half = step / 2 * values
    return (1 + half) / (1 - half), step * B / (1 - half)


def bilinear_low_rank(values: Tensor, P: Tensor, B: Tensor, step: Tensor) -> tuple[LowRankTransition, Tensor]:
    """A = Λ - PPᵀ: eigenvalues (D, N/2) complex, P and B (D, N) as real pairs, step (D, 1) -> Ā, and B̄ (D, N).

    Woodbury's identity inverts I - ΔA/2 = (I - ΔΛ/2) + Δ/2 PPᵀ, a diagonal and a matrix of rank one; with W the
    inverse, Ā = 2W - I. As A + Aᵀ is negative definite, ‖Āx‖ ≤ ‖x‖ for all parameter values.
    """
    inverse = DiagonalTransition(1 / (1 - step / 2 * values))
    g, f = inverse @ P, inverse.mT @ P
    factor = 1 / (2 / step + (P * g).sum(-1, keepdim=True))  # (D, 1)
    diagonal = DiagonalTransition(2 * inverse.values - 1)
    return LowRankTransition(diagonal, 2 * factor * g, f), step * (
        inverse @ B - factor * g * (f * B).sum(-1, keepdim=True)
    )


RULES = {"zoh": zero_order_hold_diagonal, "bilinear": bilinear_diagonal}
