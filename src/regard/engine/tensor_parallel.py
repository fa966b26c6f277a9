"""Tensor parallel inference: the shards of a model's matrices that one process (rank) holds, and the sums over ranks.

The plan is that of training (adapt/tensor_plan.py), with the matrices of experts too. The shards are plain tensors: a
step of few tokens would spend more time in the dispatch of DTensors than in its products. A rank keeps the keys and
values of its own heads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.tensor_plan import MatrixSplit, TensorPlan, divide_heads, tensor_plans
from regard.kernels.grouped_matmul import grouped_linear
from regard.models.decoder import DecoderModule
from regard.parts.attention import AttentionModule
from regard.parts.experts import GroupedLinear
from regard.parts.state import Memory, PerToken, declarations


def plans_of(decoder: DecoderModule, size: int) -> dict[str, TensorPlan]:
    """The plans of a decoder's parts, those of experts too. ValueError if they cannot be divided."""
    return tensor_plans(decoder, size, (nn.Linear, GroupedLinear))


def shard_model(decoder: DecoderModule, rank: int, size: int) -> set[AttentionModule]:
    """Replace the matrices that have a plan by this rank's shards, in place. ValueError if they cannot be divided.

    Returns the attentions whose heads are divided.
    """
    plans = plans_of(decoder, size)
    shards: dict[int, nn.Parameter] = {}  # of tied parameters there is one shard

    def shard(parameter: nn.Parameter | None, dim: int) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in shards:
            part = parameter.detach().chunk(size, dim)[rank].clone()
            shards[id(parameter)] = nn.Parameter(part, requires_grad=False)
        return shards[id(parameter)]

    for path, plan in plans.items():
        part = decoder.get_submodule(path)
        for name, split in plan.items():
            parent, _, attribute = name.rpartition(".")
            owner = part.get_submodule(parent)
            setattr(owner, attribute, sharded(getattr(owner, attribute), split, shard, rank))
    return divide_heads(decoder, plans, size)


def sharded(module: Any, split: MatrixSplit, shard: Callable, rank: int) -> nn.Module:
    """The module that computes this rank's part."""
    grouped = isinstance(module, GroupedLinear)
    match split:
        case "outputs":
            module.weight, module.bias = shard(module.weight, int(grouped)), shard(module.bias, int(grouped))
            return module
        case "inputs":
            return (SummedGroups if grouped else SummedLinear)(shard(module.weight, 1 + grouped), module.bias)
        case "heads":  # one weight for the heads of all ranks
            return module
        case "tokens":
            return ShardedEmbedding(shard(module.weight, 0), rank)
        case "logits":
            return GatheredLinear(shard(module.weight, 0), shard(module.bias, 0))


class SummedLinear(nn.Module):
    """W x + b, where each rank has a part of the columns of W, and of x."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


class SummedGroups(nn.Module):
    """The same for one matrix per expert, and rows that are sorted by expert."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        bias = self.bias if self.bias is None or dist.get_rank() == 0 else torch.zeros_like(self.bias)
        y = grouped_linear(x, self.weight, bias, ends).contiguous()
        dist.all_reduce(y)
        return y


class ShardedEmbedding(nn.Module):
    """Each rank has the rows of its part of the vocabulary."""

    def __init__(self, weight: nn.Parameter, rank: int):
        super().__init__()
        self.weight, self.first = weight, rank * len(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.first
        inside = (local >= 0) & (local < len(self.weight))
        x = F.embedding(local.where(inside, 0), self.weight) * inside.unsqueeze(-1)
        dist.all_reduce(x)
        return x


class GatheredLinear(nn.Module):
    """Each rank computes the outputs of its rows; all ranks get all of them."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias).contiguous()
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y)
        return torch.cat(parts, -1)


def local_states(decoder: DecoderModule, split: set[AttentionModule], states: Any, size: int) -> Any:
    """The states that the model declares, with the heads of one rank only. split: attentions with divided heads."""

    def local(body: nn.Module, memory: Memory) -> Memory:
        if split.isdisjoint(body.modules()):
            return memory
        found = tuple(divided(declared, size) for declared in declarations(memory))
        return found if isinstance(memory, tuple) else found[0]

    blocks: Any = decoder.stack.blocks
    return tuple(
        tuple(local(sublayer.body, memory) for sublayer, memory in zip(block.sublayers, memories, strict=True))
        for block, memories in zip(blocks, states, strict=True)
    )


def divided(declared: Any, size: int) -> Any:
    if not isinstance(declared, PerToken):
        return declared
    return replace(declared, arrays={name: (heads // size, dim) for name, (heads, dim) in declared.arrays.items()})
