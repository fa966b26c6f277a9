"""Scales of inputs that the previous module divides its outputs by: exact before rounding.

    W x = (W diag(s)) (x / s)        x / s: a norm, or a linear layer, with its weights divided by s

    norm -> all linear layers that read it        norm.weight / s (and its bias)
    up_proj -> down_proj of a gated unit          rows of up_proj / s, because the gate multiplies element by element
    v_proj -> o_proj of attention                 rows of v_proj / s, because heads are mixed over tokens only; query
                                                  heads that share a key head share its scales

A norm is folded only if nothing but linear layers reads its output, which one forward of the block shows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.parts.attention import AttentionModule
from regard.parts.feedforward import GatedModule
from regard.parts.norm import RMSNormModule

METADATA = ("__get__", "size", "dim", "numel", "stride", "is_contiguous", "element_size", "is_floating_point")


@dataclass
class Fold:
    """A module, and the linear layers that read its outputs."""

    source: nn.Module
    sinks: list[nn.Linear]
    heads: tuple[int, int] | None = None  # (key heads, query heads per key head), if source is the value projection

    def parameters(self) -> Iterator[Tensor]:
        for module in (self.source, *self.sinks):
            yield from module.parameters()

    def reduce(self, per_input: Tensor) -> Tensor:
        """A number per input of the sinks -> per output of the source: the mean of those that share it."""
        if self.heads is None:
            return per_input
        return per_input.view(*self.heads, -1).mean(1).flatten()

    def expand(self, scales: Tensor) -> Tensor:
        """A number per output of the source -> per input of the sinks."""
        if self.heads is None:
            return scales
        return scales.view(self.heads[0], 1, -1).expand(*self.heads, -1).flatten()

    @torch.no_grad()
    def apply(self, scales: Tensor) -> None:
        """Divide the outputs of the source by the scales, and multiply the inputs of the sinks by them, in place."""
        weight, bias = self.source.weight, getattr(self.source, "bias", None)
        assert isinstance(weight, Tensor)
        if getattr(self.source, "around_one", False):  # of an RMSNorm, which multiplies by 1 + weight
            weight.copy_((1 + weight) / scales.to(weight.dtype) - 1)
        else:
            weight.div_(scales.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1)))
        if bias is not None:
            bias.div_(scales.to(bias.dtype))
        for sink in self.sinks:
            sink.weight.mul_(self.expand(scales).to(sink.weight.dtype))


class Readers(TorchFunctionMode):
    """Which operations read the given tensors: weights of linear layers by the id of the tensor; None for others."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}
        self.weights: dict[int, list[Tensor | None]] = {}

    def watch(self, tensor: Tensor) -> None:
        self.tensors[id(tensor)] = tensor
        self.weights[id(tensor)] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in METADATA and not isinstance(result, Tensor):
            return result
        for argument in flatten(args, kwargs or {}):
            if id(argument) in self.weights:
                linear = func is F.linear and argument is args[0] and len(args) > 1
                self.weights[id(argument)].append(args[1] if linear else None)
        return result


def flatten(*values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += flatten(*value.values())
        elif isinstance(value, list | tuple):
            found += flatten(*value)
    return found


def find_folds(block: nn.Module, run: Callable[[], object], shared: Sequence[Tensor]) -> list[Fold]:
    """The folds of a block. run: one forward of it. shared: parameters that other modules use too; they stay."""
    readers, outputs = Readers(), {}
    norms = [m for m in block.modules() if isinstance(m, nn.LayerNorm | RMSNormModule) and m.weight is not None]

    def watch(norm: nn.Module, _: Any, output: Tensor) -> None:
        readers.watch(output)
        outputs.setdefault(norm, []).append(id(output))

    handles = [norm.register_forward_hook(watch) for norm in norms]
    try:
        with readers:
            run()
    finally:
        for handle in handles:
            handle.remove()
    layers = {id(m.weight): m for m in block.modules() if type(m) is nn.Linear}
    folds = []
    for norm, ids in outputs.items():
        read = readers.weights[ids[0]]
        if len(ids) == 1 and read and all(id(weight) in layers for weight in read):
            folds.append(Fold(norm, [layers[id(weight)] for weight in read]))
    folds += [fold for module in block.modules() for fold in pairs_of(module)]
    kept = {id(parameter) for parameter in shared}
    return [fold for fold in folds if kept.isdisjoint(map(id, fold.parameters()))]


def pairs_of(module: nn.Module) -> list[Fold]:
    """The pairs of linear layers inside a module."""
    if type(module) is GatedModule and module.limit is None and not module.offset:
        source, sink, heads = module.up_proj, module.down_proj, None
    elif type(module) is AttentionModule and isinstance(module.clip, nn.Identity):
        source, sink, heads = module.v_proj, module.o_proj, (module.kv_heads, module.heads // module.kv_heads)
    else:
        return []
    return [Fold(source, [sink], heads)] if type(source) is nn.Linear and type(sink) is nn.Linear else []
