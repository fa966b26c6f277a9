"""Which layers of a model are quantized, and why the others stay in full precision."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from regard.adapt.lora import LoRALayer
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.w8a8 import check_w8a8
from regard.formats.base import NumberFormat
from regard.formats.integers import Integer
from regard.models.decoder import DecoderModule
from regard.parts.experts import GroupedLinear
from regard.spec import SpecError

BLOCKS = "stack.blocks."


class QuantizationError(ValueError):
    """A model, or a setting, that cannot be quantized."""


@dataclass
class LayerSelection:
    formats: dict[str, NumberFormat] = field(default_factory=dict)  # of the layers to quantize
    left: dict[str, str] = field(default_factory=dict)  # name -> why it stays in full precision
    int8_inputs: bool = False  # round the inputs of the layers too


def select_layers(
    model: nn.Module, format: NumberFormat, skip: Sequence[str] = (), head: bool = False, int8_inputs: bool = False
) -> LayerSelection:
    """The linear layers of the blocks, and with `head` the output layer, except those that a pattern of `skip` matches.

    Raises QuantizationError if there are none, if a pattern matches none, or if the model has adapters or quantized
    layers already.
    """
    if not isinstance(model, DecoderModule):
        kind = getattr(getattr(model, "spec", None), "kind", type(model).__name__)
        raise QuantizationError(f"a model of kind {kind} cannot be quantized yet; only decoders can")
    if int8_inputs:
        check_w8a8(format)
    modules, selection = dict(model.named_modules()), LayerSelection(int8_inputs=int8_inputs)
    for name, module in modules.items():
        if isinstance(module, LoRALayer):
            raise QuantizationError(f"{name} has an adapter; merge it first: regard export RUN FOLDER --merge")
        if isinstance(module, QuantizedLinear):
            raise QuantizationError(
                f"{name} is stored as {module.format.kind} already; quantize the model that it was made from"
            )
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise QuantizationError(f"{name} has values that are not finite; use another checkpoint of this model")
    matchable = [name for name, module in modules.items() if isinstance(module, nn.Linear | GroupedLinear)]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in matchable):
            endings = ", ".join(sorted({name.rpartition(".")[2] for name in matchable}))
            raise QuantizationError(
                f"--skip {pattern} matches no linear layer; their names, such as {matchable[0]}, end in {endings}"
            )
    shared = {id(parameter) for parameter in shared_parameters(model)}
    for name, module in modules.items():
        if isinstance(module, nn.Linear | GroupedLinear | nn.Embedding):
            reason = reason_to_leave(name, module, format, skip, head, shared, int8_inputs)
            if reason is None:
                selection.formats[name] = with_wide_scales(format, module.weight)
            else:
                selection.left[name] = reason
    if not selection.formats:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(selection.left.items())[:3])
        raise QuantizationError(f"no layer of this model can be quantized ({reasons})")
    return selection


def reason_to_leave(
    name: str,
    module: nn.Module,
    format: NumberFormat,
    skip: Sequence[str],
    head: bool,
    shared: set[int],
    int8_inputs: bool,
) -> str | None:
    if isinstance(module, nn.Embedding):
        return "an embedding"
    if isinstance(module, GroupedLinear) and int8_inputs:
        return "a stacked weight of experts, which --activations int8 does not support"
    if name == "head" and not head:
        return "the output layer, which --head includes"
    if name != "head" and not name.startswith(BLOCKS):
        return "outside of the blocks"
    if any(fnmatchcase(name, pattern) for pattern in skip):
        return "left out by --skip"
    if type(module) not in (nn.Linear, GroupedLinear):
        return f"a {type(module).__name__}"
    assert isinstance(module, nn.Linear | GroupedLinear)
    if id(module.weight) in shared and name != "head":
        return "shared by several layers"
    try:
        format.check_shape(module.weight.shape[-2:])
    except SpecError as error:
        return str(error)
    return None


def shared_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters with several names in the model."""
    names: dict[int, list[Tensor]] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(parameter)
    return [found[0] for found in names.values() if len(found) > 1]


def with_wide_scales(format: NumberFormat, weight: Tensor) -> NumberFormat:
    """The format with scales in float32 if a group of this weight is too small for scales in float16."""
    if not isinstance(format, Integer) or format.scale_dtype != "float16":
        return format
    sizes = format.grouped(weight.detach()).abs().amax(-1) / format.levels
    small = (sizes > 0) & (sizes < 4 * torch.finfo(torch.float16).tiny)
    return replace(format, scale_dtype="float32") if bool(small.any()) else format
