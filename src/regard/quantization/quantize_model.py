"""Quantize a decoder block by block: each block gets its inputs from the blocks before it, which are quantized already.

    inputs of block i -> statistics of its layers -> scales folded (AWQ, SmoothQuant) -> codes -> inputs of block i + 1

The hidden states of the sample and the statistics of one block are in memory, whatever the depth of the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from regard.adapt.quantized import QuantizedExperts, QuantizedLinear, quantized_layer, stack_stored
from regard.adapt.w8a8 import W8A8Linear
from regard.formats.base import NumberFormat
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.parts.experts import GroupedLinear
from regard.quantization.clipping import clip_and_round, round_to_nearest, rounding_error
from regard.quantization.folding import Fold, find_folds
from regard.quantization.gptq import gptq
from regard.quantization.scaling import awq_scales, smooth_scales
from regard.quantization.select_layers import BLOCKS, LayerSelection, QuantizationError, shared_parameters
from regard.quantization.statistics import InputStatistics, add_inputs, record_inputs

Rounding = Callable[[Tensor, InputStatistics, NumberFormat], dict[str, Tensor]]
ScaleChoice = Callable[[Fold, InputStatistics, Mapping[nn.Linear, NumberFormat]], Tensor]
BlockInputs = list[tuple[Tensor, TokenLayout]]
Sample = Sequence[tuple[Tensor, TokenLayout | None]]  # token ids (B, L) with their layouts; None: whole documents


@dataclass(frozen=True)
class Method:
    round: Rounding
    scales: ScaleChoice | None = None


METHODS = {
    "nearest": Method(round_to_nearest),
    "clip": Method(clip_and_round),
    "gptq": Method(gptq),
    "awq": Method(clip_and_round, awq_scales),
    "awq-gptq": Method(gptq, awq_scales),
    "smoothquant": Method(round_to_nearest, smooth_scales),
}


@dataclass(frozen=True)
class LayerResult:
    name: str
    format: NumberFormat
    bytes: int  # of the stored tensors
    error: float  # √(Σ ‖(W - W') x‖² / Σ ‖W x‖²) over the sample
    nearest_error: float  # of rounding the original weight to nearest


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise QuantizationError(f"method={name!r} is unknown; choose one of {', '.join(METHODS)}")
    return METHODS[name]


@torch.no_grad()
def quantize_model(
    model: DecoderModule,
    selection: LayerSelection,
    method: str,
    sample: Sample,
    progress: Callable[[LayerResult], object] = lambda result: None,
) -> list[LayerResult]:
    """Replace the selected layers by quantized ones, in place. progress: called after every layer."""
    chosen, results = find_method(method), []
    linear = W8A8Linear if selection.int8_inputs else QuantizedLinear
    shared = shared_parameters(model)
    hidden = inputs_of_blocks(model, sample)
    if not hidden or not sum(x.shape[0] * x.shape[1] for x, _ in hidden):
        raise QuantizationError("the sample has no tokens; give more text with --calibrate")

    def finish(root: nn.Module, prefix: str, run: Callable[[Tensor, TokenLayout], Any]) -> None:
        formats = {name.removeprefix(prefix): f for name, f in selection.formats.items() if name.startswith(prefix)}
        for result in quantize_part(root, prefix, formats, chosen, hidden, run, shared, linear):
            results.append(result)
            progress(result)

    for index, block in enumerate(model.stack.blocks):
        finish(block, f"{BLOCKS}{index}.", lambda x, layout, block=block: block(x, layout, None))
        hidden = [(block(x, layout, None)[0], layout) for x, layout in hidden]
    if "head" in selection.formats:
        finish(model, "", lambda x, layout: model.logits(model.final_norm(x)))
    return results


@torch.no_grad()
def round_model(
    model: DecoderModule, selection: LayerSelection, progress: Callable[[LayerResult], object] = lambda result: None
) -> list[LayerResult]:
    """`quantize_model` by rounding to nearest, without a sample; the errors are those of the weights."""
    results = []
    for name, format in selection.formats.items():
        layer = model.get_submodule(name)
        weight = layer.get_parameter("weight")
        if selection.int8_inputs:
            assert isinstance(layer, nn.Linear)
            quantized = W8A8Linear.of(layer, format)
        else:
            quantized = quantized_layer(layer, format)
        model.set_submodule(name, quantized.train(layer.training))
        error = float((quantized.weight - weight).norm()) / max(float(weight.norm()), 1e-300)
        size = sum(tensor.nbytes for tensor in quantized.stored.values())
        results.append(LayerResult(name, format, size, error, error))
        progress(results[-1])
    return results


class FirstBlock(Exception):
    """Ends a forward at the first block."""


def inputs_of_blocks(model: DecoderModule, sample: Sample) -> BlockInputs:
    """The inputs of the first block, with the layouts of the stack."""
    found: BlockInputs = []

    def keep(block: nn.Module, args: tuple[Any, ...]) -> NoReturn:
        found.append((args[0], args[1]))
        raise FirstBlock

    handle = model.stack.blocks[0].register_forward_pre_hook(keep)
    try:
        for tokens, layout in sample:
            with suppress(FirstBlock):
                model(tokens, layout)
    finally:
        handle.remove()
    return found


def quantize_part(
    root: nn.Module,
    prefix: str,
    formats: Mapping[str, NumberFormat],
    method: Method,
    hidden: BlockInputs,
    run: Callable[[Tensor, TokenLayout], Any],
    shared: Sequence[Tensor],
    linear: type[QuantizedLinear],
) -> Iterable[LayerResult]:
    """Quantize the layers of one module, named from it; `prefix` is its own name."""
    chosen = {name: root.get_submodule(name) for name in formats}
    layers = {name: layer for name, layer in chosen.items() if isinstance(layer, nn.Linear)}
    experts = {name: layer for name, layer in chosen.items() if isinstance(layer, GroupedLinear)}
    if not chosen:
        return
    statistics: dict[str, InputStatistics] = {}
    for x, layout in hidden:
        with record_inputs(layers | experts, layout.valid) as inputs:
            run(x, layout)
        add_inputs(statistics, inputs)
    nearest = {
        name: rounding_error(layers[name].weight, statistics[name], formats[name])
        for name in layers
        if name in statistics
    }
    if method.scales is not None and prefix:  # the output layer has no fold
        x, layout = hidden[0]
        folds = find_folds(root, lambda: run(x, layout), shared)
        fold_scales(folds, method, layers, statistics, formats)
    for name, layer in layers.items():
        if name not in statistics:
            raise QuantizationError(f"{prefix}{name} gets no input; leave it out with --skip")
        weight, format = layer.weight, formats[name]
        stored = method.round(weight, statistics[name], format)
        quantized = linear(format, stored, (layer.out_features, layer.in_features), layer.bias, weight.dtype)
        root.set_submodule(name, quantized.train(layer.training))
        error = statistics[name].relative_error(quantized.weight - weight, weight)
        size = sum(tensor.nbytes for tensor in stored.values())
        yield LayerResult(f"{prefix}{name}", format, size, error, nearest[name])
    for name, layer in experts.items():
        found = [statistics[f"{name}.{expert}"] for expert in range(len(layer.weight))]
        quantized, result = quantize_experts(f"{prefix}{name}", layer, found, formats[name], method)
        root.set_submodule(name, quantized.train(layer.training))
        yield result


def quantize_experts(
    name: str, layer: GroupedLinear, statistics: Sequence[InputStatistics], format: NumberFormat, method: Method
) -> tuple[QuantizedExperts, LayerResult]:
    """Round the matrix of each expert by its own tokens; of an expert without tokens, to nearest."""
    weights = list(layer.weight.detach())
    matrices = [
        method.round(weight, own, format) if own.count else format.quantize(weight)
        for weight, own in zip(weights, statistics, strict=True)
    ]
    quantized = QuantizedExperts(
        format, stack_stored(matrices), tuple(layer.weight.shape), layer.bias, layer.weight.dtype
    )
    nearest = [format.dequantize(format.quantize(weight), weight.dtype) for weight in weights]

    def error(rounded: Iterable[Tensor]) -> float:
        triples = list(zip(rounded, weights, statistics, strict=True))
        difference = sum(float(own.output_error(one - weight).clamp_min(0)) for one, weight, own in triples)
        size = sum(float(own.output_error(weight)) for _, weight, own in triples)
        return (difference / max(size, 1e-300)) ** 0.5

    size = sum(tensor.nbytes for tensor in quantized.stored.values())
    return quantized, LayerResult(name, format, size, error(quantized.weight), error(nearest))


def fold_scales(
    folds: Sequence[Fold],
    method: Method,
    layers: Mapping[str, nn.Linear],
    statistics: dict[str, InputStatistics],
    formats: Mapping[str, NumberFormat],
) -> None:
    """Fold the scales that the method chooses, and replace the statistics of the scaled layers."""
    assert method.scales is not None
    names = {layer: name for name, layer in layers.items()}
    for fold in folds:
        scaled = [names[sink] for sink in fold.sinks if sink in names]
        if scaled:
            found = statistics[scaled[0]]
            scales = method.scales(fold, found, {layers[name]: formats[name] for name in scaled})
            fold.apply(scales)
            divided = found.divided_by(fold.expand(scales))
            statistics.update({name: divided for name in scaled})
