"""HiPPO: the A and B with which the state of x' = Ax + Bu approximates the past input u best. Gu et al. 2020.

    A_nk = -√(2n+1)√(2k+1)  for n > k,   -(n+1)  for n = k,   0  for n < k          B_n = √(2n+1)          LegS

The N numbers of x are the coefficients of a polynomial of degree N - 1 in e^-age that fits u with weights e^-age: the
recent past in detail, the far past coarsely. The basis functions are the Legendre polynomials ℓ_n, shifted to [0, 1],
so `reconstruct` recovers the input from the state:        u(now - age) ≈ Σ_n x_n ℓ_n(e^-age)

A is not normal, and its eigenvectors are too ill-conditioned to use (condition about 2^(4N/3)); but A + PPᵀ, with
P_n = √(n + ½), is -½ I plus a skew matrix, with orthonormal eigenvectors: A = V (Λ - PPᵀ) V*. S4 keeps P (Gu et al.
2021). S4D drops it (Gu, Gupta et al. 2022) and starts from that Λ, or from one with a closed form:

    lin    λ_n = -½ + iπn            inv    λ_n = -½ + i (N/π)(N/(2n+1) - 1)            real    λ_n = -(n+1)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.kernels.recurrent.state_space.transition import as_real


def legs(size: int) -> tuple[Tensor, Tensor]:
    """A (N, N), B (N,)"""
    n = torch.arange(size, dtype=torch.float64)
    B = (2 * n + 1).sqrt()
    return -(torch.outer(B, B).tril(-1) + torch.diag(n + 1)), B


def normal_plus_low_rank(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Λ (N/2,) complex, one of each conjugate pair, by rising frequency; P and B (N,) as real pairs."""
    A, B = legs(size)
    P = B / 2**0.5
    skew = A + torch.outer(P, P) + 0.5 * torch.eye(size, dtype=A.dtype)
    frequencies, V = torch.linalg.eigh(-1j * skew)  # of a Hermitian matrix: real, in ascending order
    frequencies, V = frequencies[size // 2 :], V[:, size // 2 :]

    def to_pairs(x: Tensor) -> Tensor:
        """The coordinates of a real vector in the orthonormal basis √2 Re v, √2 Im v."""
        return as_real(2**0.5 * (V.mH @ x.to(V.dtype)))

    return torch.complex(torch.full_like(frequencies, -0.5), frequencies), to_pairs(P), to_pairs(B)


def linear_diagonal(size: int) -> Tensor:
    n = torch.arange(size // 2, dtype=torch.float64)
    return torch.complex(torch.full_like(n, -0.5), torch.pi * n)


def inverse_diagonal(size: int) -> Tensor:
    n = torch.arange(size // 2, dtype=torch.float64)
    return torch.complex(torch.full_like(n, -0.5), size / torch.pi * (size / (2 * n + 1) - 1))


def real_diagonal(size: int) -> Tensor:
    n = torch.arange(size // 2, dtype=torch.float64)
    return torch.complex(-(n + 1), torch.zeros_like(n))


DIAGONALS: dict[str, Callable[[int], Tensor]] = {  # N -> Λ (N/2,) complex
    "lin": linear_diagonal,
    "inv": inverse_diagonal,
    "legs": lambda size: normal_plus_low_rank(size)[0],
    "real": real_diagonal,
}


def reconstruct(state: Tensor, ages: Tensor) -> Tensor:
    """The past input (…, M) at ages (M,), in units of time, from a LegS state (…, N)."""
    x = 2 * (-ages.to(state.dtype)).exp() - 1
    previous, basis = torch.zeros_like(x), [torch.ones_like(x)]
    for n in range(state.shape[-1] - 1):  # Bonnet's recursion
        previous, current = basis[-1], ((2 * n + 1) * x * basis[-1] - n * previous) / (n + 1)
        basis.append(current)
    scale = (2 * torch.arange(state.shape[-1], dtype=state.dtype) + 1).sqrt()
    return (state * scale) @ torch.stack(basis)
