"""The operations that convert a weight between two libraries, each with its inverse.

    read:  foreign tensors -> ours        write:  our tensors -> foreign        read(write(x)) = x, bit for bit

An operation maps a list of tensors to a list of tensors, so operations can be chained. `like` holds tensors of the
shapes that a read returns, because the sizes into which a fused tensor is split follow from these shapes only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Op(Protocol):
    def read(self, foreign: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]: ...

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]: ...


def concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat; of meta tensors only the shape is computed, because torch.cat would import torch's compiler."""
    if not tensors[0].is_meta:
        return torch.cat(list(tensors), dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)


def reverse_rows(x: Tensor) -> Tensor:
    """x.flip(0); meta tensors are returned unchanged, for the same reason as in `concatenate`."""
    return x if x.is_meta else x.flip(0)


@dataclass(frozen=True)
class Transpose:
    """Matrices stored as (in, out), like GPT-2's Conv1D, or as (experts, in, out); vectors are not changed."""

    def read(self, foreign: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x if x.dim() < 2 else x.mT for x in foreign]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x if x.dim() < 2 else x.mT for x in ours]


@dataclass(frozen=True)
class Split:
    """One foreign tensor is several of ours, concatenated along `dim`: fused q, k and v; fused gate and up.

    With `groups` > 1 the fused tensor holds the first group of each of ours, then the second group of each, and so on:
    in GPT-NeoX and Falcon the queries of a key/value head, its key, its value, then those of the next head.
    """

    dim: int = 0
    groups: int = 1

    def read(self, foreign: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = foreign
        sizes = [x.shape[self.dim] // self.groups for x in like]
        parts = fused.unflatten(self.dim, (self.groups, -1)).split(sizes, self.dim + 1)
        return [x.flatten(self.dim, self.dim + 1) for x in parts]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = [x.unflatten(self.dim, (self.groups, -1)) for x in ours]
        return [concatenate(parts, self.dim + 1).flatten(self.dim, self.dim + 1)]


@dataclass(frozen=True)
class Reshape:
    """The same numbers; `shape` is the foreign shape, with at most one -1: a convolution kernel is a matrix of ours."""

    shape: tuple[int, ...]

    def read(self, foreign: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.reshape(y.shape) for x, y in zip(foreign, like, strict=True)]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.reshape(self.shape) for x in ours]


@dataclass(frozen=True)
class StackTensors:
    """Many foreign tensors are one of ours, stacked along dim 0: the matrices of experts."""

    def read(self, foreign: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack(list(foreign))]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        (stacked,) = ours
        return stacked.unbind()


@dataclass(frozen=True)
class ConvTaps:
    """Foreign: (channels, 1, k) of a depthwise Conv1d, oldest tap first; ours: (k, channels), newest tap first."""

    def read(self, foreign: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [reverse_rows(x.squeeze(1).t()) for x in foreign]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [reverse_rows(x).t().unsqueeze(1) for x in ours]


@dataclass(frozen=True)
class InterleavePairs:
    """The foreign rows of each head are in RoPE's interleaved layout; ours are in the half layout.

    In a head of 2h rows, the foreign rows 2i and 2i + 1 are our rows i and h + i.
    """

    heads: int

    def read(self, foreign: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2) for x in foreign]

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2) for x in ours]
