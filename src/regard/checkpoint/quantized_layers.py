"""Linear layers in a model folder whose weights are stored in a number format.

    config.json        "quantization": {"layers": {"stack.blocks.0.sublayers.0.body.q_proj": {"kind": "integer", …}, …},
                                        "int8_inputs": [names of layers whose inputs are rounded too]}
    *.safetensors      stack.blocks.0.sublayers.0.body.q_proj.codes, ….scale

The tensors keep their dtypes; `dtype` of a loaded model is that of the products. Names, shapes and dtypes are checked
before anything is read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.adapt.quantized import QuantizedExperts, QuantizedLinear, stored_like
from regard.adapt.w8a8 import W8A8Linear, check_w8a8
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.safetensors_header import CODES
from regard.checkpoint.weight_files import open_tensors
from regard.formats.base import NumberFormat
from regard.parts.experts import GroupedLinear
from regard.spec import SpecError, parse_spec
from regard.weights.table import FLOATS, MISMATCH_REMEDY, StoredTensor

LayerTypes = dict[str, tuple[NumberFormat, type[QuantizedLinear]]]
KEY = "quantization"
DTYPE_NAMES = {dtype: name for name, dtype in (FLOATS | CODES).items()}


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the quantized layers, without their biases, by their names in the model."""
    return {
        f"{path}.{name}": tensor
        for path, layer in quantized_layers(model).items()
        for name, tensor in layer.stored.items()
    }


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """The entry of config.json; empty for a model without quantized layers."""
    found = quantized_layers(model)
    layers = {name: layer.format.to_dict() for name, layer in found.items()}
    int8_inputs = [name for name, layer in found.items() if isinstance(layer, W8A8Linear)]
    return {KEY: {"layers": layers, **({"int8_inputs": int8_inputs} if int8_inputs else {})}} if layers else {}


def refuse_quantized_layers(model: nn.Module, action: str) -> None:
    for name, layer in quantized_layers(model).items():
        raise CheckpointError(
            f"{name} is stored as {layer.format.kind}, which {action} cannot write; export the model before it was "
            "quantized, or ordinary weights, with --dequantize (`dequantize_linears` in Python)"
        )


def layer_types(model: nn.Module) -> LayerTypes:
    return {name: (layer.format, type(layer)) for name, layer in quantized_layers(model).items()}


def read_layer_types(folder: Path, config: Mapping[str, Any]) -> LayerTypes:
    """The format and the class of every quantized layer by name."""
    entry = config.get(KEY, {"layers": {}})
    layers = entry.get("layers") if isinstance(entry, dict) else None
    if not isinstance(layers, dict):
        raise CheckpointError(f"{folder}: {KEY} in config.json must have `layers`, the format of every layer")
    names = entry.get("int8_inputs", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name in layers for name in names):
        raise CheckpointError(f"{folder}: {KEY}.int8_inputs in config.json must list names of `layers`")
    types: LayerTypes = {}
    for name, table in layers.items():
        format = parse_spec(table, f"{KEY}.layers.{name:.200}", NumberFormat)
        assert isinstance(format, NumberFormat)
        types[name] = (format, W8A8Linear if name in names else QuantizedLinear)
    return types


def use_layer_types(model: nn.Module, types: LayerTypes) -> None:
    """Replace linear layers of a model on the meta device by quantized ones, in place."""
    modules = dict(model.named_modules())
    for name, (format, layer_type) in types.items():
        linear = modules.get(name)
        if type(linear) is GroupedLinear and layer_type is not W8A8Linear:
            layer_type = QuantizedExperts
        elif type(linear) is not nn.Linear:
            found = "no layer of this model" if linear is None else f"a {type(linear).__name__}"
            raise CheckpointError(f"{KEY} in config.json: {name:.200} is {found}, not a linear one; {MISMATCH_REMEDY}")
        shape = tuple(linear.weight.shape)
        try:
            format.check_shape(shape[-2:])
            if layer_type is W8A8Linear:
                check_w8a8(format)
        except SpecError as error:
            raise CheckpointError(f"{KEY} in config.json: {name}: {error}; {MISMATCH_REMEDY}") from error
        model.set_submodule(name, layer_type(format, stored_like(format, shape), shape, linear.bias))


def without_stored(found: Mapping[str, StoredTensor], expected: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """The other tensors, after those of quantized layers were checked against the expected ones on the meta device."""
    for name, like in expected.items():
        if name not in found:
            raise CheckpointError(f"{name} {tuple(like.shape)} is missing from the files; {MISMATCH_REMEDY}")
        tensor, dtype = found[name], DTYPE_NAMES[like.dtype]
        if (tensor.shape, tensor.dtype) != (tuple(like.shape), dtype):
            raise CheckpointError(
                f"{tensor.file}: {name} should be {tuple(like.shape)} in {dtype} by the config, found {tensor.shape} "
                f"in {tensor.dtype}; {MISMATCH_REMEDY}"
            )
    return {name: tensor for name, tensor in found.items() if name not in expected}


def read_stored(folder: Path, expected: Mapping[str, Tensor], mmap: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of quantized layers in their own dtypes."""
    found = open_tensors(folder, lambda stored: stored, mmap) if expected else {}
    for name in expected:
        yield name, found[name].read()


def use_dtype_of_parameters(model: nn.Module) -> None:
    """Let the weights that are read from formats have the dtype of the model's first parameter."""
    layers = quantized_layers(model).values()
    for layer in layers:
        layer.dtype = next(model.parameters()).dtype
