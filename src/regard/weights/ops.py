"""The steps that a weight takes between two libraries, each with its inverse.

    read:  their tensors -> ours        write:  our tensors -> theirs        read(write(x)) = x, bit for bit

A step maps a list of tensors to a list of tensors, so that steps chain. `like` holds tensors of the shapes that a read
must give: where a fused tensor is to be cut is known only from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Op(Protocol):
    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]: ...

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Transpose:
    """Matrices stored as (in, out), like GPT-2's Conv1D; vectors stay as they are."""

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.t() for x in theirs]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.t() for x in ours]


@dataclass(frozen=True)
class Split:
    """One tensor of theirs holds several of ours one after the other: packed q, k and v; packed gate and up."""

    dim: int = 0

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = theirs
        return fused.split([x.shape[self.dim] for x in like], self.dim)

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat(list(ours), self.dim)]


@dataclass(frozen=True)
class Stack:
    """Many tensors of theirs are one of ours: experts, each with matrices of its own."""

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack(list(theirs))]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        (stacked,) = ours
        return stacked.unbind()
