"""Linear layers that keep the codes of a quantized checkpoint.

    one tensor of the file is the weight of one of our layers       its codes and scales, as they are
    it is split into rows of ours (fused q, k and v)                the rows of codes and scales
    otherwise (experts in one stack, transposed weights,            an ordinary weight, dequantized when it is read
    embeddings, a format of theirs that ours cannot hold)

Scales are stored per row, like the codes. NF4 with blocks that divide the inputs becomes NF4 without double
quantization if rows move: its scales are stored in blocks across rows.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from regard.adapt.quantized import QuantizedLinear, can_quantize
from regard.adapt.w8a8 import W8A8Linear
from regard.checkpoint.foreign_quantized.opening import QuantizedTensor
from regard.formats.base import NumberFormat, Stored
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.weights.ops import Op, Split
from regard.weights.table import Chain, Link, StoredTensor, Table


@dataclass(frozen=True)
class KeptLayers:
    """Our layers that are read from one tensor of the file."""

    link: Link
    names: list[str]  # of our weights
    stages: list  # of the link
    tensor: QuantizedTensor
    format: NumberFormat  # of our layers

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of our layers by name."""
        weight = self.tensor.weight
        assert weight.format is not None
        stored = weight.stored()
        if not self.link.ops:
            rows = {key: [tensor] for key, tensor in stored.items()}
        else:
            per_row = to_rows(weight.format, stored, weight.shape)
            rows = {key: self.link.read([tensor], self.stages) for key, tensor in per_row.items()}
        for key, tensors in rows.items():
            for name, tensor in zip(self.names, tensors, strict=True):
                flat = isinstance(self.format, NF4) and key == "scale"
                yield f"{name.removesuffix('.weight')}.{key}", (tensor.flatten() if flat else tensor).contiguous()


def moves_rows(op: Op) -> bool:
    return isinstance(op, Split) and op.dim == 0


def row_format(format: NumberFormat, inputs: int) -> NumberFormat | None:
    """The format of a weight whose rows are moved; None if rows share scales."""
    if isinstance(format, NF4):
        return NF4(format.block, double=False) if inputs % format.block == 0 else None
    single = isinstance(format, Integer) and format.group == "tensor"
    return format if isinstance(format, Float | Integer) and not single else None


def to_rows(format: NumberFormat, stored: Stored, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Stored tensors that have one row per output."""
    if not isinstance(format, NF4):
        return dict(stored)
    return {"codes": stored["codes"], "scale": format.scales(stored).view(shape[0], -1)}


def find_kept(model: nn.Module, table: Table | Chain, found: Mapping[str, StoredTensor]) -> list[KeptLayers]:
    """The layers of the model, on the meta device, that can keep their codes."""
    if not isinstance(table, Table) or not any(isinstance(tensor, QuantizedTensor) for tensor in found.values()):
        return []
    found, parameters = table.canonical_names(found), dict(model.named_parameters())
    uses = [id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False)]
    kept = []
    for link, values, names in table.matches(parameters):
        stages = link.stages([parameters[name] for name in names])
        foreign = link.foreign_names(values, len(stages[0]))
        tensor = found.get(foreign[0])
        if len(foreign) > 1 or not isinstance(tensor, QuantizedTensor) or tensor.weight.format is None:
            continue
        layers = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        single = all(type(layer) is nn.Linear and uses.count(id(layer.weight)) == 1 for layer in layers)
        if not single or tensor.shape != tuple(stages[0][0].shape) or not all(map(moves_rows, link.ops)):
            continue
        format = tensor.weight.format if not link.ops else row_format(tensor.weight.format, tensor.shape[1])
        if format is not None and all(
            can_quantize(name, layer, format) for name, layer in zip(names, layers, strict=True)
        ):
            kept.append(KeptLayers(link, names, stages, tensor, format))
    return kept


def layer_types_of(kept: list[KeptLayers]) -> dict[str, tuple[NumberFormat, type[QuantizedLinear]]]:
    return {
        name.removesuffix(".weight"): (each.format, W8A8Linear if each.tensor.weight.int8_inputs else QuantizedLinear)
        for each in kept
        for name in each.names
    }


def read_kept(kept: list[KeptLayers]) -> Iterator[tuple[str, Tensor]]:
    for each in kept:
        yield from each.read()


def without_kept(folder: Path, found: Mapping[str, StoredTensor], kept: list[KeptLayers]) -> dict[str, StoredTensor]:
    """The other tensors; a warning says how many of them are dequantized, and why."""
    kept_ids = {id(each.tensor) for each in kept}
    rest = {name: tensor for name, tensor in found.items() if id(tensor) not in kept_ids}
    dequantized = {name: tensor for name, tensor in rest.items() if isinstance(tensor, QuantizedTensor)}
    if dequantized:
        name, first = next(iter(dequantized.items()))
        reason = first.weight.reason or "our module for it has no quantized form, or its rows share scales"
        count = f"{len(dequantized)} quantized weights become ordinary ones, with the same numbers"
        warnings.warn(f"{folder}: {count}; {name}: {reason}", stacklevel=3)
    return rest
