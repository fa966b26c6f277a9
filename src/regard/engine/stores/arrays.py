"""The arrays of stores: how per-token arrays are encoded, and memory that is used as it is written.

    parts = encoding.encode(name, x)        x (B, heads, L, dim) -> the arrays that are stored for it, by name
    x' = encoding.decode(name, parts)       from the same arrays of all cached tokens

An array is stored as it is, or in a number format with a scale per token and head (formats/): a token is encoded once,
when it is written, and every query reads the same numbers, whatever the chunks. Per-token scales: Sheng et al. 2023
(FlexGen), Liu et al. 2024 (KIVI).

`torch.zeros` on a CPU writes its zeros, so all of the memory is used at once. `zeros` come from `calloc`: the operating
system gives a page when it is first written, so a pool for many long sequences costs little while it is empty, and its
address never changes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.formats.base import NumberFormat
from regard.formats.integers import Integer
from regard.parts.state import PerToken

ALIGNMENT = 64  # bytes, as torch aligns its own
DIM = 512  # a multiple of every group
StoredPart = tuple[str, int, int, torch.dtype]  # name, heads, dim and dtype of a stored array


@dataclass(frozen=True)
class QuantizedTokens(PerToken):
    """Per-token arrays in a number format, of which the newest tokens are also kept as they are."""

    format: NumberFormat = field(default_factory=Integer)
    recent: int = 0  # tokens, the query's own included, that are read as they are


class PlainArrays(NamedTuple):
    """Arrays as they are."""

    dtype: torch.dtype
    quantizes = False

    def parts(self, declared: PerToken) -> Iterator[StoredPart]:
        return ((name, heads, dim, self.dtype) for name, (heads, dim) in declared.arrays.items())

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        return {name: x}

    def decode(self, name: str, parts: Mapping[str, Any]) -> Any:
        return parts[name]


class QuantizedArrays(NamedTuple):
    """Arrays in a number format; its codes and scales are arrays with the same heads, such as `k.codes`."""

    format: NumberFormat
    dtype: torch.dtype  # of the decoded arrays
    quantizes = True

    def parts(self, declared: PerToken) -> Iterator[StoredPart]:
        for name, (heads, dim) in declared.arrays.items():
            self.format.check_shape((heads, dim))
            for part, like in self.format.stored_like((heads, dim)).items():
                yield f"{name}.{part}", heads, like.numel() // heads, as_bytes(like).dtype

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        stored = self.format.quantize_values(x.to(torch.promote_types(x.dtype, torch.float32)))
        return {f"{name}.{part}": as_bytes(t).view(*x.shape[:-1], -1) for part, t in stored.items()}

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        return self.format.dequantize(self.stored(name, parts), self.dtype)

    def error_bound(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """The largest difference of a decoded number from the one that was encoded."""
        return self.format.error_bound(self.stored(name, parts))

    def stored(self, name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts as the format returned them."""
        stored = {part.removeprefix(f"{name}."): array for part, array in parts.items()}
        for part, dtype, per_head in part_kinds(self.format):
            array = stored[part].view(dtype)
            stored[part] = array.squeeze(-1) if per_head else array
        return stored


@cache
def part_kinds(format: NumberFormat) -> list[tuple[str, torch.dtype, bool]]:
    """The parts of a format, their dtypes, and whether a part is one number per head, without a last dimension."""
    return [(part, like.dtype, like.dim() == 1) for part, like in format.stored_like((1, DIM)).items()]


def as_bytes(array: Tensor) -> Tensor:
    """Numbers of eight bits as integers: torch cannot index all of them on every device."""
    return array.view(torch.uint8) if array.dtype.itemsize == 1 else array


def encoding_of(declared: PerToken, dtype: torch.dtype) -> PlainArrays | QuantizedArrays:
    return QuantizedArrays(declared.format, dtype) if isinstance(declared, QuantizedTokens) else PlainArrays(dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)  # as bytes: NumPy has no bfloat16
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(*shape)
