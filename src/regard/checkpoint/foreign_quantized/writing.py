"""Write the quantized layers of a model under the names of a family.

    NF4                            the layout of bitsandbytes
    integers, FP8 (e4m3)           the layout of compressed-tensors, which transformers and vLLM read
    bfloat16, float16              ordinary weights

The numbers are those of the model: no weight is rounded again. A fused projection of the family is written if its parts
have one format: rows of codes follow each other. What a layout cannot hold is refused with the name of the layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapt.quantized import QuantizedExperts, QuantizedLinear
from regard.adapt.w8a8 import W8A8Linear
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.foreign_quantized import bitsandbytes_layout, compressed_tensors_layout
from regard.checkpoint.foreign_quantized.keep_codes import moves_rows, row_format, to_rows
from regard.checkpoint.foreign_quantized.layer import REMEDY, WrittenLayer, refuse
from regard.checkpoint.quantized_layers import quantized_layers
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.models.base import Model, build_on_meta
from regard.weights.table import Link, Table, match_placeholders


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of layers in formats of 16 bits, which are ordinary ones, by their names in the model."""
    return {
        f"{name}.weight": layer.stored["codes"]
        for name, layer in quantized_layers(model).items()
        if isinstance(layer.format, Float) and not layer.format.scaled
    }


def quantized_files(model: nn.Module, spec: Model, table: Table) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of quantized layers by their names in the family, and `quantization_config`; both may be empty."""
    plain = plain_weights(model)
    layers = {name: layer for name, layer in quantized_layers(model).items() if f"{name}.weight" not in plain}
    if not layers:
        return {}, {}
    built = build_on_meta(spec)
    written = list(foreign_layers(layers, dict(built.named_parameters()), table, next(model.parameters()).dtype))
    linears = [f"{name}.weight" for name, module in built.named_modules() if type(module) is nn.Linear]
    others = [name for name in linears if name.removesuffix(".weight") not in layers]
    ignored = list(dict.fromkeys(foreign_modules(table, others)))
    normal = [isinstance(layer.format, NF4) for layer in written]
    if any(normal) and not all(normal):
        yes, no = written[normal.index(True)].source, written[normal.index(False)].source
        raise CheckpointError(
            f"{yes} is stored as nf4 and {no} is not, but in a folder of bitsandbytes all layers are; quantize all "
            f"layers in one format, or {REMEDY}"
        )
    return (bitsandbytes_layout if all(normal) else compressed_tensors_layout).write(written, ignored)


def foreign_layers(
    layers: Mapping[str, QuantizedLinear], like: Mapping[str, Tensor], table: Table, dtype: torch.dtype
) -> Iterator[WrittenLayer]:
    """like: the parameters of the model on the meta device. dtype: of its ordinary weights."""
    found: set[str] = set()
    for link, values, names in table.matches(like):
        parts = {path: layers.get(path) for path in (name.removesuffix(".weight") for name in names)}
        if any(layer is not None for layer in parts.values()):
            found |= {*parts}
            count = len(link.stages([like[name] for name in names])[0])
            yield family_layer(link, parts, link.foreign_names(values, count), dtype)
    for name in layers:
        if name not in found:
            refuse(
                name, layers[name].format, "the config ties it to the embeddings; quantize the model without its head"
            )


def family_layer(
    link: Link, parts: Mapping[str, QuantizedLinear | None], foreign: Sequence[str], dtype: torch.dtype
) -> WrittenLayer:
    """The layer of the family with the rows of one or several of ours.

    parts: our layers by name, None for those that are not quantized. foreign: the names of the family's weights.
    """
    source, first = next((name, layer) for name, layer in parts.items() if layer is not None)
    target = foreign[0].removesuffix(".weight")
    if isinstance(first, QuantizedExperts):
        refuse(source, first.format, "no layout has stacked matrices of experts")
    if len(foreign) > 1 or not all(map(moves_rows, link.ops)):
        refuse(source, first.format, f"the family stores it in another order, as {target}")
    layers = []
    for name, layer in parts.items():
        if layer is None or layer.format != first.format or type(layer) is not type(first):
            refuse(source, first.format, f"the family fuses it with {name}, which has another format, as {target}")
        layers.append(layer)
    joined = join_rows(link, layers)
    if joined is None:
        refuse(source, first.format, f"the family fuses it as {target}, and its rows share scales")
    shape = (sum(layer.out_features for layer in layers), first.in_features)
    return WrittenLayer(target, source, *joined, shape, isinstance(first, W8A8Linear), dtype)


def join_rows(link: Link, layers: Sequence[QuantizedLinear]) -> tuple[NumberFormat, dict[str, Tensor]] | None:
    """The format and the stored tensors of one layer with the rows of these; None if rows share scales."""
    format, stored = with_scale_per_output(layers[0])
    if not link.ops:
        return format, stored
    joined = row_format(format, layers[0].in_features)
    if joined is None:
        return None
    tables = [
        to_rows(format, with_scale_per_output(layer)[1], (layer.out_features, layer.in_features)) for layer in layers
    ]
    return joined, {name: link.write([table[name] for table in tables])[0] for name in tables[0]}


def with_scale_per_output(layer: QuantizedLinear) -> tuple[NumberFormat, dict[str, Tensor]]:
    """The format and the stored tensors; a scale of the whole weight is repeated for every output."""
    format, stored = layer.format, dict(layer.stored)
    if not isinstance(format, Integer) or format.group != "tensor":
        return format, stored
    outputs = layer.out_features
    repeated = {name: tensor.reshape(1, 1).repeat(outputs, 1) for name, tensor in stored.items() if name != "codes"}
    return replace(format, group="channel"), {"codes": stored["codes"], **repeated}


def foreign_modules(table: Table, names: Sequence[str]) -> Iterator[str]:
    """The names in the family of the modules with these weights."""
    for name in names:
        for link in table.links:
            if (values := match_placeholders(link.ours[0], name)) is not None:
                yield link.foreign_names(values, 1)[0].removesuffix(".weight")
