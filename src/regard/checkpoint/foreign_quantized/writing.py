"""Write the quantized layers of a model under the names of a family.

    NF4                            the layout of bitsandbytes
    integers, FP8 (e4m3)           the layout of compressed-tensors, which transformers and vLLM read
    bfloat16, float16              ordinary weights

The numbers are those of the model: no weight is rounded again. A fused projection of the family is written if its parts
have one format: rows of codes follow each other. What a layout cannot hold is refused with the name of the layer.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    found = set()
    for link, values, names in table.matches(like):
        paths = [name.removesuffix(".weight") for name in names]
        if not any(path in layers for path in paths):
            continue
        found |= {*paths}
        parts = [layers.get(path) for path in paths]
        targets = link.foreign_names(values, len(link.stages([like[name] for name in names])[0]))
        target = targets[0].removesuffix(".weight")
        yield merged(link, paths, parts, target, len(targets), dtype)
    for name in layers:
        if name not in found:
            refuse(
                name, layers[name].format, "the config ties it to the embeddings; quantize the model without its head"
            )


def merged(
    link: Link,
    paths: Sequence[str],
    parts: Sequence[QuantizedLinear | None],
    target: str,
    targets: int,
    dtype: torch.dtype,
) -> WrittenLayer:
    """One layer of the family from one or several of ours."""
    first_path, first = next((path, part) for path, part in zip(paths, parts, strict=True) if part is not None)
    if isinstance(first, QuantizedExperts):
        refuse(first_path, first.format, "no layout has stacked matrices of experts")
    if targets > 1 or not all(map(moves_rows, link.ops)):
        refuse(first_path, first.format, f"the family stores it in another order, as {target}")
    for path, part in zip(paths, parts, strict=True):
        if part is None or part.format != first.format or type(part) is not type(first):
            refuse(first_path, first.format, f"the family fuses it with {path}, which has another format, as {target}")
    layers = [part for part in parts if part is not None]
    shape = (sum(layer.out_features for layer in layers), first.in_features)
    format = first.format
    if isinstance(format, Integer) and format.group == "tensor":
        format = Integer(format.bits, format.symmetric, "channel", format.scale_dtype)
    per_row = [with_scale_per_output(first.format, layer) for layer in layers]
    if link.ops:
        rows = row_format(format, first.in_features)
        if rows is None:
            refuse(first_path, format, f"the family fuses it as {target}, and its rows share scales")
        tables = [
            to_rows(format, stored, (layer.out_features, layer.in_features))
            for stored, layer in zip(per_row, layers, strict=True)
        ]
        stored = {key: link.write([table[key] for table in tables])[0] for key in tables[0]}
        format = rows
    else:
        (stored,) = per_row
    return WrittenLayer(target, first_path, format, stored, shape, isinstance(first, W8A8Linear), dtype)


def with_scale_per_output(format: NumberFormat, layer: QuantizedLinear) -> dict[str, Tensor]:
    """The stored tensors; a scale of the whole weight is repeated for every output."""
    if not isinstance(format, Integer) or format.group != "tensor":
        return dict(layer.stored)
    codes = layer.stored["codes"]
    return {k: v if k == "codes" else v.reshape(1, 1).repeat(len(codes), 1) for k, v in layer.stored.items()}


def foreign_modules(table: Table, names: Sequence[str]) -> Iterator[str]:
    """The names in the family of the modules with these weights."""
    for name in names:
        for link in table.links:
            if (values := match_placeholders(link.ours[0], name)) is not None:
                yield link.foreign_names(values, 1)[0].removesuffix(".weight")
