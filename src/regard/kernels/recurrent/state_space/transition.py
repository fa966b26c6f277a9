"""Ā, the linear map of one step, one per channel, in three forms.

    Diagonal      Ā x = d ⊙ x                    O(N) per step, and so are its powers                S4D
    LowRank       Ā x = d ⊙ x - g (fᵀx)          O(N) per step; powers are Dense                     S4
    Dense         Ā x                            O(N²) per step

States are real, (…, D, N): N/2 pairs, each one complex number, which d rotates and scales. A pair represents two
conjugate eigenvalues, and inner products of states are plain sums over N, so fᵀx is real without taking real parts.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Transition(Protocol):
    def __matmul__(self, x: Tensor) -> Tensor:
        """(…, D, N) -> (…, D, N)"""
        ...

    def squared(self) -> "Transition": ...

    @property
    def mT(self) -> "Transition": ...


@dataclass(frozen=True)
class DiagonalTransition:
    values: Tensor  # (D, N/2) complex

    def __matmul__(self, x: Tensor) -> Tensor:
        return as_real(self.values.to(as_complex(x).dtype) * as_complex(x))

    def squared(self) -> Self:
        return type(self)(self.values.square())

    @property
    def mT(self) -> Self:
        return type(self)(self.values.conj())


@dataclass(frozen=True)
class DenseTransition:
    matrix: Tensor  # (D, N, N)

    def __matmul__(self, x: Tensor) -> Tensor:
        columns = x.flatten(0, -3).permute(1, 2, 0)  # (D, N, …)
        return (self.matrix @ columns).permute(2, 0, 1).view(x.shape)

    def squared(self) -> Self:
        return type(self)(self.matrix @ self.matrix)

    @property
    def mT(self) -> Self:
        return type(self)(self.matrix.mT)


@dataclass(frozen=True)
class LowRankTransition:
    diagonal: DiagonalTransition
    g: Tensor  # (D, N)
    f: Tensor  # (D, N)

    def __matmul__(self, x: Tensor) -> Tensor:
        g, f = self.g.to(x.dtype), self.f.to(x.dtype)
        return self.diagonal @ x - g * (f * x).sum(-1, keepdim=True)

    def squared(self) -> DenseTransition:
        size = self.g.shape[-1]
        unit = torch.eye(size, dtype=self.g.dtype, device=self.g.device)
        images = self @ unit.unsqueeze(1).expand(-1, len(self.g), -1)  # (N, D, N) images of the unit vectors
        return DenseTransition(images.permute(1, 2, 0)).squared()

    @property
    def mT(self) -> Self:
        return type(self)(self.diagonal.mT, self.f, self.g)


def as_complex(x: Tensor) -> Tensor:
    """Real (…, N) as complex (…, N/2)"""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def as_real(x: Tensor) -> Tensor:
    """Complex (…, N/2) as real (…, N)"""
    return torch.view_as_real(x.resolve_conj()).flatten(-2)
