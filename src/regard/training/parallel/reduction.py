"""The sums and the gradient of a step over all processes (step.py).

    loss = Σ loss_sum / Σ count          ‖g‖² = Σ over processes of ‖local shard‖² / copies of the shard

All processes compute the same floats: the norm is one sum over all of them, and the sums are added in the order of the
ranks. So they clip alike, and agree whether a loss or gradient is finite.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard.training.parallel.mesh import Processes
from regard.training.step import Reduction


class ParallelReduction(Reduction):
    def __init__(self, model: nn.Module, processes: Processes):
        """model: the one that runs the forward of training, of DDP or with fully_shard"""
        self.model, self.processes = model, processes
        self.ranks = processes.row_ranks

    def micro_batch(self, last: bool) -> AbstractContextManager:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(self.model, DistributedDataParallel):
            return nullcontext() if last else self.model.no_sync()
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def gather(self, sums: list[list[float]]) -> list[list[float]]:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # after an evaluation, which has no backward, the root would keep whole weights
        sizes = self.processes.sizes
        local = torch.tensor(sums, dtype=torch.float64, device=self.processes.device)  # (micro-batches, sums)
        everywhere = [torch.empty_like(local) for _ in range(self.processes.count)]
        dist.all_gather(everywhere, local)
        by_rank = torch.stack(everywhere).unflatten(0, (self.ranks, sizes.context, sizes.tensor))
        return by_rank[:, :, 0].sum(1).flatten(0, 1).tolist()  # processes along `tensor` have the same sums

    def gradients(self, parameters: Iterable[Tensor]) -> tuple[list[Tensor], Tensor]:
        by_copies: dict[float, list[Tensor]] = {}
        for parameter in (p for p in parameters if p.grad is not None):
            gradient, copies = local_gradient(parameter, self.processes.count)
            by_copies.setdefault(copies, []).append(gradient)
        square = torch.zeros((), dtype=torch.float64, device=self.processes.device)
        for copies, gradients in by_copies.items():
            square += torch.stack(torch._foreach_norm(gradients)).double().square().sum() / copies
        dist.all_reduce(square)
        return [gradient for gradients in by_copies.values() for gradient in gradients], square.sqrt()


def local_gradient(parameter: Tensor, processes: int) -> tuple[Tensor, float]:
    """The shard of the gradient in this process, and the number of processes that have the same shard."""
    from torch.distributed.tensor import DTensor

    gradient = parameter.grad
    assert gradient is not None, "the parameter has a gradient"
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient, processes
    if gradient.placements != parameter.placements:  # partial sums
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    mesh, copies = parameter.device_mesh, float(processes)
    for dimension, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            copies /= mesh.size(dimension)
    return gradient.to_local(), copies
