"""One quantized layer in the files of another library: its tensors, and the weight that they store.

    model.layers.0.self_attn.q_proj.qweight, .qzeros, .scales      ->      model.layers.0.self_attn.q_proj.weight

Shapes and dtypes are checked against the headers of the files before any bytes are read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from regard.checkpoint.atomic_folder import CheckpointError
from regard.formats.base import NumberFormat
from regard.spec import SpecError
from regard.weights.table import StoredTensor

INTEGERS = ("I32",)
REMEDY = "export ordinary weights, to a folder or a GGUF file, with --dequantize (`dequantize_linears` in Python)"
MAX_SMALL = 1 << 20  # numbers of a tensor that is read to learn the format of a layer


@dataclass(frozen=True)
class ForeignWeight:
    """The weight of a quantized layer in the files, which is read when `dequantize` or `stored` is called."""

    shape: tuple[int, int]  # (outputs, inputs)
    dequantize: Callable[[torch.dtype], Tensor]  # the weight in this dtype
    format: NumberFormat | None  # of ours, with the same numbers; None: there is none
    stored: Callable[[], dict[str, Tensor]]  # the tensors of that format
    reason: str = ""  # why there is no such format
    int8_inputs: bool = False  # the layer rounds its inputs to eight bits


@dataclass(frozen=True)
class WrittenLayer:
    """A quantized layer to write. name: in the family. source: in our model. dtype: of the ordinary weights."""

    name: str
    source: str
    format: NumberFormat
    stored: Mapping[str, Tensor]
    shape: tuple[int, int]  # (outputs, inputs)
    int8_inputs: bool
    dtype: torch.dtype


def refuse(name: str, format: NumberFormat, fault: str) -> NoReturn:
    """name: of a quantized layer that cannot be written, in our model. fault: the reason, a clause."""
    raise CheckpointError(f"{name} is stored as {format.kind}, but {fault}; {REMEDY}")


def exact_weight(
    format: NumberFormat, shape: tuple[int, int], stored: Callable[[], dict[str, Tensor]], int8_inputs: bool = False
) -> ForeignWeight:
    """A weight whose numbers are those of a format of ours."""
    try:
        format.check_shape(shape)
    except SpecError as error:
        return ForeignWeight(shape, lambda dtype: format.dequantize(stored(), dtype), None, stored, str(error))
    return ForeignWeight(
        shape, lambda dtype: format.dequantize(stored(), dtype), format, stored, int8_inputs=int8_inputs
    )


def other_weight(shape: tuple[int, int], dequantize: Callable[[torch.dtype], Tensor], reason: str) -> ForeignWeight:
    """A weight that no format of ours can hold."""

    def stored() -> dict[str, Tensor]:
        raise AssertionError("a weight without a format has no stored tensors")

    return ForeignWeight(shape, dequantize, None, stored, reason)


def as_bytes(words: Tensor) -> Tensor:
    """Rows of words of 32 bits as rows of bytes, the lowest first."""
    return words.contiguous().flatten().view(torch.uint8).view(len(words), -1)


class LayerFiles:
    """The tensors of a layer by the last part of their names: `qweight`, `weight.absmax` …"""

    def __init__(self, name: str, tensors: Mapping[str, StoredTensor]):
        self.name, self.tensors = name, tensors

    def __contains__(self, leaf: str) -> bool:
        return leaf in self.tensors

    def find(self, leaf: str) -> StoredTensor:
        if leaf not in self.tensors:
            files = ", ".join(sorted({tensor.file for tensor in self.tensors.values()}))
            raise CheckpointError(f"{files}: {self.name}.{leaf} is missing; download the folder again")
        return self.tensors[leaf]

    def matrix(self, leaf: str, dtypes: Sequence[str]) -> tuple[int, int]:
        """The shape of a tensor that must be a matrix of one of these dtypes."""
        shape = self.find(leaf).shape
        if len(shape) != 2 or 0 in shape:
            self.refuse(leaf, "should be a matrix")
        self.expect(leaf, dtypes, shape)
        return shape[0], shape[1]

    def expect(self, leaf: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> StoredTensor:
        """The tensor, whose header must have one of these dtypes and one of these shapes."""
        tensor = self.find(leaf)
        if tensor.shape not in shapes or tensor.dtype not in dtypes:
            allowed = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
            self.refuse(leaf, f"should be {allowed} in {' or '.join(dtypes)}")
        return tensor

    def small(self, leaf: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> Tensor:
        """A tensor of few numbers, read now."""
        tensor = self.expect(leaf, dtypes, *shapes)
        if math.prod(tensor.shape) > MAX_SMALL:
            self.refuse(leaf, f"should have at most {MAX_SMALL} numbers")
        return tensor.read()

    def scales(self, leaf: str) -> Tensor:
        """Scales, which must be finite."""
        tensor = self.find(leaf).read()
        if not tensor.float().isfinite().all():
            self.refuse(leaf, "has values that are not finite", found="")
        return tensor

    def refuse(self, leaf: str, fault: str, found: str | None = None) -> NoReturn:
        tensor = self.find(leaf)
        if found is None:
            found = f", found {tensor.shape} in {tensor.dtype}"
        raise CheckpointError(f"{tensor.file}: {self.name}.{leaf} {fault}{found}; download the folder again")
