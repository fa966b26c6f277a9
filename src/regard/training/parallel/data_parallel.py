"""Data parallelism: every process computes the gradient of its own rows, and torch sums the gradients.

    replicate (DDP)    all weights in every process                               Li et al. 2020
    shard (FSDP2)      weights, gradients and moments sharded over processes,     Rajbhandari et al. 2020 (ZeRO-3),
                       gathered block by block when they are needed               Zhao et al. 2023

Both compute sums, not means, because the step divides by the count of all processes (step.py). Weights stay float32;
matrix products run in bfloat16 on GPUs by autocast, as in a single process. Processes along the dimension `context`
are summed too: they have different tokens of the same rows.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from regard.models.outputs import LazyLogits, Outputs
from regard.parts.block import BlockModule, ParallelBlockModule
from regard.spec import require
from regard.training.parallel.mesh import Processes

SHARDED = ("shard", "expert", "context")  # dimensions over which fully_shard distributes weights


def replicate_model(model: nn.Module, processes: Processes) -> nn.Module:
    """The model for the forward of training; its gradients are summed over the processes."""
    mesh = processes.submesh("replicate", "context")
    assert mesh is not None, "there is only one process"
    devices = [processes.device] if processes.device.type == "cuda" else None
    replicated = DistributedDataParallel(
        model, device_ids=devices, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )
    replicated.register_comm_hook(mesh.get_group(), sum_bucket)
    return replicated


def sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The sum of a bucket of gradients; without this hook DDP computes the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None, "an asynchronous operation"
    return work.get_future().then(lambda future: future.value()[0])


def shard_model(model: nn.Module, processes: Processes, experts: Sequence[nn.Module] = ()) -> None:
    """Shard the parameters in place, block by block; the rest of the model is one more group.

    experts: modules whose parameters are already distributed along `expert`; they are sharded over the others.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    check_scalars(model)
    mesh = shard_mesh(processes)
    ignored = {parameter for module in experts for parameter in module.parameters()}
    if (expert_mesh := processes.submesh("replicate", "shard", "context")) is not None:
        for module in experts:
            fully_shard(module, mesh=expert_mesh, shard_placement_fn=partial(shard_rows, expert_mesh.size()))
        ignored = set()  # fully_shard leaves out the parameters of modules that are sharded already
    for group in block_groups(model):
        fully_shard(group if len(group) > 1 else group[0], mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    model.register_forward_hook(drop_weight_hooks)  # runs after the hook of fully_shard
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def shard_mesh(processes: Processes, names: tuple[str, ...] = SHARDED) -> Any:
    """The mesh for fully_shard: (sharded,), or (replicated, sharded)."""
    sharded = processes.submesh(*names)
    assert sharded is not None and processes.mesh is not None, "no dimension to shard over"
    if processes.sizes.replicate == 1:
        return sharded
    assert sharded.mesh_dim_names is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dimensions that were flattened; there is no other public way
        return processes.mesh["replicate", sharded.mesh_dim_names[0]]


def shard_rows(processes: int, parameter: nn.Parameter) -> Shard | None:
    """Shard the rows of each expert if they can be divided, not the experts, which are distributed already."""
    return Shard(1) if parameter.shape[1] % processes == 0 else None


def check_scalars(model: nn.Module) -> None:
    """Raise SpecError for parameters without dimensions, which fully_shard does not support."""
    scalars = [name for name, p in model.named_parameters() if p.ndim == 0]
    require(
        not scalars,
        f"{', '.join(scalars)} is a single number, which cannot be sharded; use parallel.replicate=-1 and shard=1",
    )


def drop_weight_hooks(module: nn.Module, arguments: tuple, output: Any) -> None:
    """Remove the hooks of fully_shard from the weights of lazy logits.

    fully_shard adds a hook to every tensor that a forward returns. The weights are parameters, so one more hook would
    stay on them after every forward; the hook on the hidden states has the same effect.
    """
    if isinstance(output, Outputs):
        for logits in (output.logits, *output.ahead_logits):
            if isinstance(logits, LazyLogits):
                for parameter in (logits.weight, logits.bias):
                    if parameter is not None and parameter._backward_hooks:
                        parameter._backward_hooks.clear()


def block_groups(model: nn.Module) -> list[list[nn.Module]]:
    """The blocks of the model; blocks that share parameters are in one group, because they are sharded together.

    Blocks that share parameters with other modules are left out: they belong to the group of the rest.
    """
    blocks = [module for module in model.modules() if isinstance(module, BlockModule | ParallelBlockModule)]
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {
        parameter
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    groups: list[tuple[list[nn.Module], set[nn.Parameter]]] = []
    for block in blocks:
        members: list[nn.Module] = [block]
        parameters, separate = set(block.parameters()), []
        for other_members, other_parameters in groups:
            if parameters.isdisjoint(other_parameters):
                separate.append((other_members, other_parameters))
            else:
                members, parameters = other_members + members, parameters | other_parameters
        groups = [*separate, (members, parameters)]
    return [members for members, parameters in groups if parameters and parameters.isdisjoint(outside)]
