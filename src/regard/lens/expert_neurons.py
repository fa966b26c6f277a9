"""Removal of neurons of single experts in a mixture of experts.

The rows of the tap `experts.neurons` are tokens sorted by expert, so a hook needs to know where the rows of an expert
end: it is an argument of the module of the experts, which a second hook reads.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels.grouped_matmul import row_experts
from regard.lens.hooks import eager_hooks
from regard.lens.inputs import check_index
from regard.parts.experts import ExpertsModule


class ExpertNeurons:
    """Neurons (layer, expert, index) of the blocks of a model."""

    def __init__(self, prefix: str, blocks: Any, neurons: Sequence[tuple[int, ...]]):
        self.neurons: dict[nn.Module, list[tuple[int, int]]] = {}  # the module of a layer's experts -> (expert, index)
        self.means: dict[nn.Module, Tensor] = {}  # (X, F)
        for neuron in neurons:
            if len(neuron) != 3:
                raise ValueError(f"neuron {neuron} is neither (layer, index) nor (layer, expert, index)")
            layer, expert, index = neuron
            experts = experts_of(blocks, layer, f"{prefix}stack.blocks.{layer}")
            check_index("expert", expert, experts.spec.count)
            self.neurons.setdefault(experts.experts, []).append((expert, index))

    def __bool__(self) -> bool:
        return bool(self.neurons)

    @contextmanager
    def averaging(self) -> Generator[None]:
        """Keep the mean of each neuron over the rows of its expert, 0 for an expert without rows."""

        def keep(module: nn.Module, h: Tensor, ends: Tensor) -> None:
            chosen, h = row_experts(h, ends), h.to(torch.promote_types(h.dtype, torch.float32))
            sums = h.new_zeros(len(ends), h.shape[-1]).index_add(0, chosen, h)
            counts = torch.bincount(chosen, minlength=len(ends)).clamp_min(1)
            self.means[module] = sums / counts.unsqueeze(-1)

        with self.hooked(keep):
            yield

    @contextmanager
    def removed(self) -> Generator[None]:
        def replace(module: nn.Module, h: Tensor, ends: Tensor) -> Tensor:
            chosen, new = row_experts(h, ends), h.clone()
            for expert, index in self.neurons[module]:
                check_index("neuron", index, h.shape[-1])
                mean = self.means[module][expert, index].to(h.dtype) if module in self.means else 0.0
                new[chosen == expert, index] = mean
            return new

        with self.hooked(replace):
            yield

    @contextmanager
    def hooked(self, function: Any) -> Generator[None]:
        """Call function(module, neurons, ends) at the tap of each module; its result replaces the neurons."""
        ends: dict[nn.Module, Tensor] = {}

        def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            (ends[module],) = kwargs["ends"]

        with eager_hooks(*self.neurons) as stack:
            for module in self.neurons:
                stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
                tap = module.get_submodule("neurons")
                call = tap.register_forward_hook(lambda _, args, h, module=module: function(module, h, ends[module]))
                stack.callback(call.remove)
            yield


def experts_of(blocks: Any, layer: int, name: str) -> ExpertsModule:
    block = blocks[check_index("layer", layer, len(blocks))]
    found = [module for module in block.modules() if isinstance(module, ExpertsModule)]
    if len(found) != 1:
        raise ValueError(f"{name} has {len(found)} mixtures of experts, but (layer, expert, index) needs one")
    return found[0]
