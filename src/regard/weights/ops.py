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


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, but of meta tensors the shape alone: torch would import its compiler for it, which takes seconds."""
    if not parts[0].is_meta:
        return torch.cat(list(parts), dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def turned(x: Tensor) -> Tensor:
    """The last row first; meta tensors as they are, for the same reason."""
    return x if x.is_meta else x.flip(0)


@dataclass(frozen=True)
class Transpose:
    """Matrices stored as (in, out), like GPT-2's Conv1D, also those of many experts; vectors stay as they are."""

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x if x.dim() < 2 else x.mT for x in theirs]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x if x.dim() < 2 else x.mT for x in ours]


@dataclass(frozen=True)
class Split:
    """One tensor of theirs holds several of ours one after the other: packed q, k and v; packed gate and up.

    With `groups` it does so group after group: each key head behind its queries and before its values (GPT-NeoX,
    Falcon). The first group of all of ours comes first, then the second.
    """

    dim: int = 0
    groups: int = 1

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = theirs
        sizes = [x.shape[self.dim] // self.groups for x in like]
        parts = fused.unflatten(self.dim, (self.groups, -1)).split(sizes, self.dim + 1)
        return [x.flatten(self.dim, self.dim + 1) for x in parts]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = [x.unflatten(self.dim, (self.groups, -1)) for x in ours]
        return [joined(parts, self.dim + 1).flatten(self.dim, self.dim + 1)]


@dataclass(frozen=True)
class Shape:
    """The same numbers in another shape of theirs, one of whose sides may be -1: a kernel that is a matrix here."""

    sides: tuple[int, ...]

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.reshape(y.shape) for x, y in zip(theirs, like, strict=True)]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.reshape(self.sides) for x in ours]


@dataclass(frozen=True)
class StackTensors:
    """Many tensors of theirs are one of ours: experts, each with matrices of its own."""

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack(list(theirs))]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        (stacked,) = ours
        return stacked.unbind()


@dataclass(frozen=True)
class ConvTaps:
    """The weights of a short convolution as torch.nn.Conv1d keeps them: (channels, 1, k), the oldest tap first."""

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [turned(x.squeeze(1).t()) for x in theirs]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [turned(x).t().unsqueeze(1) for x in ours]


@dataclass(frozen=True)
class InterleavePairs:
    """Rows of every head in RoPE's other layout: theirs are the pairs (0, h), (1, h + 1) … of a head's two halves."""

    heads: int

    def read(self, theirs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2) for x in theirs]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2) for x in ours]
