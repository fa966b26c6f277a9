"""Expert parallelism: the experts are distributed over processes, and tokens are sent to those that hold their experts.

    rows sorted by expert -> all-to-all -> rows of the local experts -> experts -> all-to-all -> the same order

Lepikhin et al. 2020 (GShard). The router and all other parts are in every process. A process computes the gradient of
its experts over the tokens of all processes along `expert`, so it is not summed over these again.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.kernels.grouped_matmul import grouped_linear
from regard.parts.experts import ExpertsModule, GroupedLinear
from regard.parts.split_heads import divisors
from regard.spec import require
from regard.training.parallel.mesh import Processes
from regard.training.parallel.sharded_files import local_tensor


def distribute_experts(model: nn.Module, processes: Processes) -> list[nn.Module]:
    """Distribute the experts of all mixtures, in place; returns the modules with their parameters."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, size = processes.submesh("expert"), processes.sizes.expert
    assert mesh is not None, "expert > 1"
    mixtures = {path: module for path, module in model.named_modules() if isinstance(module, ExpertsModule)}
    require(bool(mixtures), f"parallel: expert={size}, but this model has no experts; use shard")
    for path, mixture in mixtures.items():
        count = mixture.spec.count
        require(
            count % size == 0,
            f"parallel: {count} experts cannot be divided by expert={size}; choose expert from "
            f"{', '.join(map(str, divisors(count)))}",
        )
        for name, module in mixture.experts.named_modules():
            if not list(module.parameters(recurse=False)):
                continue
            require(
                type(module) is GroupedLinear,
                f"parallel: expert={size}, but {path}.experts.{name} is a {type(module).__name__}; adapted experts "
                "cannot be distributed, use shard",
            )
            assert isinstance(module, GroupedLinear)
            for parameter_name, parameter in list(module.named_parameters()):
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                module.register_parameter(parameter_name, nn.Parameter(sharded, parameter.requires_grad))
            module.forward = partial(project_locally, module)
        exchange = Exchange(count // size, mesh.get_group())
        mixture.experts.register_forward_pre_hook(exchange.send, with_kwargs=True)
        mixture.experts.register_forward_hook(exchange.return_rows)
    return [mixture.experts for mixture in mixtures.values()]


def project_locally(module: GroupedLinear, x: Tensor, ends: Tensor) -> Tensor:
    """The forward of a GroupedLinear with the experts of this process only."""
    weight, bias = (local_tensor(parameter) for parameter in (module.weight, module.bias))
    return grouped_linear(x, weight, bias, ends)


class Exchange:
    """Sends the rows of a forward to the processes of their experts, and returns the results."""

    def __init__(self, local_experts: int, group: dist.ProcessGroup):
        self.local_experts, self.group = local_experts, group
        self.processes = dist.get_world_size(group)

    def send(self, module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Replaces x (T, D), sorted by expert, and the ends of the experts' rows by those of the local experts."""
        (x,), (ends,) = arguments, keywords["ends"]
        counts = ends.diff(prepend=ends.new_zeros(1)).view(self.processes, self.local_experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=self.group)
        self.sent_rows, self.received_rows = counts.sum(1).tolist(), received.sum(1).tolist()
        rows = AllToAll.apply(x, self.received_rows, self.sent_rows, self.group)
        # Rows arrive by process and, within a process, by expert.
        experts = torch.arange(self.local_experts, device=x.device).repeat(self.processes)
        self.order = experts.repeat_interleave(received.flatten()).argsort(stable=True)
        return (rows[self.order],), keywords | {"ends": (received.sum(0).cumsum(0),)}

    def return_rows(self, module: nn.Module, arguments: tuple, y: Tensor) -> Tensor:
        unsorted = torch.empty_like(y).index_copy(0, self.order, y)
        return AllToAll.apply(unsorted, self.sent_rows, self.received_rows, self.group)


class AllToAll(torch.autograd.Function):
    """Consecutive rows of x are sent to the processes of the group in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return exchange(x, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradient, ctx.sent, ctx.received, ctx.group), None, None, None


def exchange(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    y = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
    return y
