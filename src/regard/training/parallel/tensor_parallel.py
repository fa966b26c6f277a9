"""Tensor parallelism: DTensor distributes the matrices of a part over processes (the plan is in adapt/tensor_plan.py).

The loss sums over the logits of all processes, so that no process has those of the whole vocabulary.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from regard.adapt.tensor_plan import MatrixSplit, divide_heads, tensor_plans, tied_parameters
from regard.kernels.linear_cross_entropy import VocabularyShard, linear_cross_entropy
from regard.models.outputs import LazyLogits, Outputs
from regard.training.parallel.mesh import Processes
from regard.training.parallel.sharded_files import local_tensor, whole_tensor


def distribute_matrices(model: nn.Module, processes: Processes) -> None:
    """Distribute the matrices of all parts that have a plan, in place."""
    mesh, size = processes.submesh("tensor"), processes.sizes.tensor
    assert mesh is not None, "tensor > 1"
    tied = list(tied_parameters(model))
    plans = tensor_plans(model, size)
    for path, plan in plans.items():
        styles = {name: style_of(split) for name, split in plan.items()}
        parallelize_module(model.get_submodule(path), mesh, styles)
    divide_heads(model, plans, size)
    for name, first in tied:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, model.get_parameter(first))


def style_of(split: MatrixSplit) -> ParallelStyle:
    match split:
        case "outputs":
            return ColwiseParallel()
        case "inputs":
            return RowwiseParallel()
        case "heads":  # the gradient is a sum over the heads of all processes
            return SequenceParallel(sequence_dim=1, use_local_output=True)
        case "tokens":
            return RowwiseParallel(input_layouts=Replicate())
        case "logits":
            return ColwiseParallel(output_layouts=Replicate())


class ShardedLogits(LazyLogits):
    """Lazy logits of a head whose weight and bias are DTensors, sharded by rows: one process has those of V / tensor
    tokens. The loss combines sums over these, so no process computes all logits (kernels/linear_cross_entropy.py)."""

    def gather(self) -> LazyLogits:
        bias = None if self.bias is None else whole_tensor(self.bias)
        return LazyLogits(*self._replace(weight=whole_tensor(self.weight), bias=bias))

    def materialize(self) -> Tensor:
        return self.gather().materialize()

    def logprobs(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather().logprobs(targets)

    def cross_entropy(
        self, targets: Tensor, weights: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.weight, DTensor) and self.weight.device_mesh.ndim == 1
        mesh, rows = self.weight.device_mesh, local_tensor(self.weight)
        shard = VocabularyShard(mesh.get_group(), mesh.get_local_rank() * len(rows), len(self.weight))
        return linear_cross_entropy(
            self.hidden.flatten(0, -2), rows, targets.flatten(), weights.flatten(), local_tensor(self.bias),
            self.scale, self.softcap, label_smoothing=label_smoothing, z_loss=z_loss, shard=shard,
        )  # fmt: skip


def shard_logits(model: nn.Module) -> None:
    """Let the model return sharded logits. After fully_shard, which warns of outputs that are views."""
    model.register_forward_hook(replace_logits)


def replace_logits(module: nn.Module, arguments: tuple, output: Any) -> Any:
    if not isinstance(output, Outputs):
        return output
    return output._replace(logits=sharded(output.logits), ahead_logits=tuple(map(sharded, output.ahead_logits)))


def sharded(logits: Any) -> Any:
    is_sharded = isinstance(logits, LazyLogits) and isinstance(logits.weight, DTensor)
    return ShardedLogits(*logits) if is_sharded else logits
