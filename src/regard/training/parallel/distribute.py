"""Distributes a model over the processes of a run.

    tensor -> expert -> context -> shard (FSDP2) or replicate (DDP)

Parameters keep their names and shapes: a sharded one is a DTensor of the whole shape.
"""

import torch
from torch import nn

from regard.spec import require
from regard.training.muon import Muon
from regard.training.optimizer import SGD, AdamW
from regard.training.parallel.mesh import Processes, describe
from regard.training.parallel.reduction import ParallelReduction
from regard.training.recipe import Training
from regard.training.step import SINGLE_PROCESS, Reduction


def distribute(model: nn.Module, processes: Processes) -> tuple[nn.Module, Reduction]:
    """The model for the forward of training, and the reduction of its steps.

    All processes must have the same weights. The model itself is changed in place.
    """
    sizes = processes.sizes
    if processes.mesh is None:
        return model, SINGLE_PROCESS
    # Imported here, because DTensor takes a second to import, which a single process does not need.
    from regard.training.parallel.context_parallel import use_ring_attention
    from regard.training.parallel.data_parallel import replicate_model, shard_model
    from regard.training.parallel.expert_parallel import distribute_experts
    from regard.training.parallel.tensor_parallel import distribute_matrices, shard_logits

    require(
        sizes.replicate == 1 or sizes.tensor == 1 or max(sizes.shard, sizes.expert, sizes.context) > 1,
        f"parallel: {describe(sizes)}: matrices that are distributed cannot be replicated by DDP; use shard instead of "
        "replicate",
    )
    if sizes.tensor > 1:
        distribute_matrices(model, processes)
    experts = distribute_experts(model, processes) if sizes.expert > 1 else []
    if sizes.context > 1:
        use_ring_attention(model, processes)
    if max(sizes.shard, sizes.expert, sizes.tensor) == 1:
        model = replicate_model(model, processes)
    elif max(sizes.shard, sizes.expert, sizes.context) > 1:
        shard_model(model, processes, experts)
    if sizes.tensor > 1:
        shard_logits(model)
    return model, ParallelReduction(model, processes)


def check_scope(scope: str, processes: Processes) -> None:
    """Raise SpecError for a loss that compares all rows of a batch, if the rows are distributed."""
    require(
        scope == "token" or processes.row_ranks * processes.sizes.context == 1,
        f"parallel: {describe(processes.sizes)}: this loss compares all rows of a batch; use one process, or tensor",
    )


def is_whole(processes: Processes) -> bool:
    """Whether a single process can run the model."""
    sizes = processes.sizes
    return max(sizes.shard, sizes.expert, sizes.context, sizes.tensor) == 1


def check_settings(settings: Training, scope: str, processes: Processes) -> None:
    """Raise SpecError for settings that need the whole model or batch in one process."""
    check_scope(scope, processes)
    sizes = describe(processes.sizes)
    require(
        processes.sizes.context == 1 or settings.monitor_every == 0,
        f"parallel: {sizes}: the entropy of attention needs all keys of a query; set train.monitor_every=0",
    )
    require(
        is_whole(processes) or type(settings.optimizer) in (AdamW, SGD, Muon),
        f"parallel: {sizes}: {settings.optimizer.kind} needs whole matrices; use adamw, muon or sgd, or replicate",
    )
    require(
        processes.sizes.tensor == 1 or settings.precision != "fp8",
        f"parallel: {sizes}: FP8 products need whole matrices; set train.precision=bfloat16, or use shard",
    )


def split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Split the parameter groups, so that all parameters of a group are on the same mesh: torch's fused updates take
    no others. Call it before the first step."""
    groups = []
    for group in optimizer.param_groups:
        names = group.get("param_names", [None] * len(group["params"]))
        by_mesh: dict[object, list[tuple]] = {}
        for parameter, name in zip(group["params"], names, strict=True):
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append((parameter, name))
        for pairs in by_mesh.values():
            split = group | {"params": [parameter for parameter, _ in pairs]}
            groups.append(split | ({"param_names": [name for _, name in pairs]} if "param_names" in group else {}))
    optimizer.param_groups[:] = groups
