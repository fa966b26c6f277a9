"""Measurements of every layer during training, every `train.monitor_every` steps, as values of metrics.jsonl.

    grad_norm/stack.blocks.3                        the norm of the layer's gradient, before clipping
    largest_activation/stack.blocks.3               max |x| of the layer's output, on the first row of the batch
    attention_entropy/stack.blocks.3.sublayers.0.body   the mean over heads and queries, in nats (Zhai et al. 2023)

Activations and attention are measured by a forward pass of its own, in eval mode and without gradients. The random
generators are left unchanged, so training is bit-identical with and without it. If several processes train, all run it,
and the values of the main process, which has the first row, are logged.
"""

import re

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.lens.hooks import eager_hooks, record
from regard.lens.maps import Call, attention_modules, map_kind, record_calls, row_entropy
from regard.objectives.base import LossFunction
from regard.parts.block import BlockModule
from regard.parts.tap import HasAttentionMap
from regard.training.parallel.mesh import Processes
from regard.training.step import SINGLE_PROCESS, Precision, Reduction

ONE_PROCESS = Processes()
LAYER = re.compile(r"(.*?blocks\.\d+)\.")


def gradient_norms(model: nn.Module, count: float, reduction: Reduction = SINGLE_PROCESS) -> dict[str, float]:
    """The gradient's norm in each layer and in each module outside the layers; gradients are sums over `count`."""
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            match = LAYER.match(name)
            layers.setdefault(match[1] if match else name.split(".")[0], []).append(parameter)
    norms = {layer: reduction.gradients(parameters)[1] for layer, parameters in layers.items()}
    return {f"grad_norm/{layer}": float(norm) / count for layer, norm in norms.items()}


@torch.no_grad()
def measure_activations(
    model: nn.Module, objective: LossFunction, batch: Batch, precision: Precision, processes: Processes = ONE_PROCESS
) -> dict[str, float]:
    """The largest activation of each layer, and the entropy of each attention that has a map.

    processes: those along `tensor` have different heads
    """
    device, mode = next(model.parameters()).device, model.training
    layers = [name for name, module in model.named_modules() if isinstance(module, BlockModule)]
    attention = {
        name: module
        for name, module in attention_modules(model)
        if isinstance(module, HasAttentionMap) and not map_kind(module).implied
    }
    calls: dict[str, list[Call]] = {name: [] for name in attention}
    model.eval()
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        precision(),
        record(model, layers) as outputs,
        eager_hooks(model) as stack,
    ):
        for name, module in attention.items():
            for handle in record_calls(module, calls[name]):
                stack.callback(handle.remove)
        objective(model, batch.rows(slice(0, 1)))
    model.train(mode)
    activations = {f"largest_activation/{name}": float(outputs[name].abs().max()) for name in layers if name in outputs}
    sums = {name: processes.sum_heads(sum_entropy(attention[name], calls[name])) for name in attention if calls[name]}
    return activations | {f"attention_entropy/{name}": float(total / count) for name, (total, count) in sums.items()}


def sum_entropy(module: HasAttentionMap, calls: list[Call]) -> Tensor:
    """The sum of the entropy over calls, heads and the queries that attend to a key, and their number."""
    entropies = []
    for layout, taps in calls:
        for head in range(module.heads):  # one at a time, because a head has L² weights
            weights = module.attention_map(taps, layout, slice(head, head + 1))
            entropies.append(row_entropy(weights)[weights.sum(-1) > 0])
    values = torch.cat(entropies).double()
    return torch.stack([values.sum(), values.new_tensor(len(values))])
