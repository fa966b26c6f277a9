"""Parameters by part, counted on modules that are built on the meta device, which takes no memory for weights.

Each tensor is counted once, at its first use, so a tied head has no weights in the count. A token is routed to few of
the experts; the parameters of the others are inactive for it, and so are those of the `ahead` blocks and of a value
head, which only training uses.

    total = shared + X · expert          active = shared + k · expert
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import NamedTuple

from torch import nn

from regard.adapt.quantized import can_quantize
from regard.formats.base import NumberFormat
from regard.models.base import Model, build_on_meta
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.stack import Stack, unroll
from regard.parts.body import Body

MOST_LAYERS = 10_000

# The part under which a child module's parameters are counted, apart from those of its bodies.
PART_OF_CHILD = {
    "input": "embedding",
    "widen": "embedding",
    "embedding_norm": "norm",
    "stack": "norm",
    "narrow": "head",
}


def stacks(spec: Model) -> dict[str, Decoder | Encoder]:
    """The decoders and encoders of a model by the name of their module; "" if the model is one itself."""
    if isinstance(spec, Decoder | Encoder):
        return {"": spec}
    children = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {name: child for name, child in children.items() if isinstance(child, Decoder | Encoder)}


def bodies(stack: Decoder | Encoder) -> list[Body]:
    return [sublayer.body for block in unroll(stack.layers) for sublayer in block.sublayers]


def all_bodies(spec: Model) -> list[tuple[Body, int]]:
    """Every body with the width of its stack."""
    return [(body, stack.width) for stack in stacks(spec).values() for body in bodies(stack)]


def inactive_parameters(stack: Decoder | Encoder, tokens: int = 1) -> int:
    """Parameters of the experts that `tokens` tokens do not use; each repetition of tied layers routes separately."""
    return sum(
        sublayer.body.inactive_params(stack.width, tokens * run.times)
        if run.tied
        else run.times * sublayer.body.inactive_params(stack.width, tokens)
        for run in stack.layers
        for block in run.blocks
        for sublayer in block.sublayers
    )


@dataclass(frozen=True)
class Parameters:
    parts: dict[str, int]
    inactive: int  # the number of parameters that one token does not use
    quantized: dict[str, tuple[int, int]] = field(default_factory=dict)  # by part: parameters in formats, their bytes

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def active(self) -> int:
        return self.total - self.inactive

    def stored_bytes(self, bits: int) -> dict[str, int]:
        """Bytes by part. bits: per parameter that is in no format."""
        found = {part: self.quantized.get(part, (0, 0)) for part in self.parts}
        return {part: (self.parts[part] - numbers) * bits // 8 + size for part, (numbers, size) in found.items()}


def build_to_count(spec: Model) -> nn.Module:
    """The model on the meta device. ValueError if it has too many layers to count, or a size that exceeds 64 bits."""
    layers = sum(run.times * len(run.blocks) for stack in stacks(spec).values() for run in stack.layers)
    if layers > MOST_LAYERS:
        raise ValueError(f"a model of {layers:,} layers is too large to count; give at most {MOST_LAYERS:,}")
    try:
        return build_on_meta(spec)
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"this model is too large: {reason}; lower its width, layers or vocab") from error


def count_parameters(spec: Model, formats: Mapping[str, NumberFormat] | None = None) -> Parameters:
    """formats: of the quantized layers, by their names in the model."""
    model = build_to_count(spec)
    counts, counted, quantized = Counter(), set(), {}
    stored = {model.get_submodule(name).get_parameter("weight"): format for name, format in (formats or {}).items()}

    def count(part: str, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter not in counted:
                counted.add(parameter)
                counts[part.strip()] += parameter.numel()
            if parameter in stored:
                format, shape = stored.pop(parameter), parameter.shape  # one matrix per expert
                numbers, size = quantized.get(part.strip(), (0, 0))
                size += prod(shape[:-2]) * format.bytes(shape[-2:])
                quantized[part.strip()] = (numbers + parameter.numel(), size)

    modules = {name: model.get_submodule(name) for name in stacks(spec)}
    uses = Counter(parameter for module in modules.values() for parameter in module.parameters())
    count("embedding", [parameter for parameter, times in uses.items() if times > 1])  # one table for both stacks
    for name, spec_of_stack in stacks(spec).items():
        stack = modules[name].get_submodule("stack")
        assert isinstance(stack, Stack)
        sublayers = [sublayer for block in stack.blocks for sublayer in block.get_submodule("sublayers").children()]
        for body, sublayer in zip(bodies(spec_of_stack), sublayers, strict=True):
            count(f"{name} {body.kind}", sublayer.get_submodule("body").parameters())
        for child, module in modules[name].named_children():
            count(f"{name} {PART_OF_CHILD.get(child, child)}", module.parameters())
    for child, module in model.named_children():
        count(child, module.parameters())
    count("rest", model.parameters())
    training_only = counts["ahead"] + counts["value_head"]
    inactive = sum(inactive_parameters(stack) for stack in stacks(spec).values()) + training_only
    return Parameters({part: number for part, number in counts.items() if number}, inactive, quantized)


def non_embedding_parameters(count: Parameters) -> int:
    """The active parameters without embeddings and output layer, the size N of scaling laws (Kaplan et al. 2020)."""
    outside = sum(number for part, number in count.parts.items() if part.split()[-1] in ("embedding", "head"))
    return count.active - outside


def shared_and_expert_params(total: float, active: float, experts: int, top_k: int) -> tuple[float, float]:
    """(shared, one expert) of a mixture of experts, from its total and active parameters."""
    if not 0 < top_k < experts:
        raise ValueError(f"top_k={top_k} must be from 1 to {experts - 1}, fewer than experts={experts}")
    expert = (total - active) / (experts - top_k)
    return total - experts * expert, expert


def relative_to_dense(experts: int, top_k: int, expert_size: float = 1.0) -> tuple[float, float]:
    """(parameters, FLOPs) of a mixture of experts relative to one dense feed-forward layer.

    expert_size: size of one expert relative to that layer.
    """
    return experts * expert_size, top_k * expert_size


class QuantizedSize(NamedTuple):
    bytes: int  # of all weights
    weights: int  # numbers in the quantized layers
    layer_bytes: int  # of these layers, scales included

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.layer_bytes / self.weights if self.weights else 0.0


def quantized_size(spec: Model, format: NumberFormat, bits: int) -> QuantizedSize:
    """The weights after `regard.adapt.quantize_linears`. bits: per weight that is not quantized.

    An output layer that shares its matrix with the embedding gets a matrix of its own.
    """
    model = build_to_count(spec)
    layers = {module: module.weight for name, module in model.named_modules() if can_quantize(name, module, format)}
    shapes = [weight.shape for weight in layers.values()]
    others = {
        id(parameter): parameter.numel()
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if module not in layers or name != "weight"
    }
    layer_bytes = sum(shape[:-2].numel() * format.bytes(shape[-2:]) for shape in shapes)  # one matrix per expert
    weights = sum(shape.numel() for shape in shapes)
    return QuantizedSize(layer_bytes + sum(others.values()) * bits // 8, weights, layer_bytes)
