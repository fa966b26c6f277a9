"""Tensor parallelism: the matrices of a part are distributed over processes, which hold the same tokens.

    attention      W_q, W_k, W_v by heads, W_o by its columns            head h is computed by one process
    feed-forward   W_up, W_gate by rows, W_down by columns               one sum over processes per body
    embedding      by rows, together with the head, if the vocabulary    the loss sums over the logits of all
                   can be divided                                        processes

Shoeybi et al. 2019 (Megatron-LM). The plan follows from the types of the parts. Parts without a plan (recurrent mixers,
norms, experts, adapted projections) are computed by every process in full, which is exact, but saves nothing.
"""

from collections.abc import Iterator
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

from regard.kernels.linear_cross_entropy import VocabularyShard, linear_cross_entropy
from regard.models.decoder import DecoderModule
from regard.models.outputs import LazyLogits, Outputs
from regard.parts.attention import AttentionModule, Gate
from regard.parts.cross_attention import CrossAttentionModule
from regard.parts.feedforward import FeedForwardModule, GatedModule
from regard.parts.position.base import PositionModule
from regard.parts.position.rope import RopeModule
from regard.parts.split_heads import divisors
from regard.spec import require
from regard.training.parallel.mesh import Processes
from regard.training.parallel.sharded_files import local_tensor, whole_tensor

TensorPlan = dict[str, ParallelStyle]  # by the name of a submodule


def distribute_matrices(model: nn.Module, processes: Processes) -> None:
    """Distribute the matrices of all parts that have a plan, in place."""
    mesh, size = processes.submesh("tensor"), processes.sizes.tensor
    assert mesh is not None, "tensor > 1"
    tied = list(tied_parameters(model))
    shares_bias = any(
        type(module).share_bias is not PositionModule.share_bias
        for module in model.modules()
        if isinstance(module, PositionModule)
    )
    plans = {path: plan for path, module in model.named_modules() if (plan := plan_of(module, size, shares_bias))}
    if isinstance(model, DecoderModule) and (plan := vocabulary_plan(model, size)):
        plans[""] = plan  # not in an encoder-decoder, whose source may share the table
    require(
        bool(plans),
        f"parallel: tensor={size}, but no part of this model can be distributed (attention without bias or sinks, "
        "feed-forward layers, the embedding); use shard",
    )
    for path, plan in plans.items():
        parallelize_module(model.get_submodule(path), mesh, plan)
    for name, first in tied:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, model.get_parameter(first))


def tied_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Every further name of a tied parameter, with its first name."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            yield name, first[parameter]


def plan_of(module: nn.Module, size: int, shares_bias: bool) -> TensorPlan:
    """The plan of a part; empty if it has none. Heads of an attention are counted per process from here on."""
    if type(module) in (AttentionModule, CrossAttentionModule):
        assert isinstance(module, AttentionModule)
        return {} if shares_bias else attention_plan(module, size)
    if isinstance(module, FeedForwardModule | GatedModule):
        return feedforward_plan(module, size)
    return {}


def attention_plan(attention: AttentionModule, size: int) -> TensorPlan:
    projections = {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    norms = {f"{name}.norm": getattr(attention, name) for name in ("q_norm", "k_norm")}
    over_all = any(norm.heads > 1 and not isinstance(norm.norm, nn.Identity) for norm in norms.values())
    has_plan = (
        all(type(projection) is nn.Linear for projection in projections.values())
        and type(attention.position) in (PositionModule, RopeModule)
        and attention.sinks is None
        and attention.dropout == 0
        and not over_all
    )
    if not has_plan:
        return {}
    require(
        attention.kv_heads % size == 0,
        f"parallel: kv_heads={attention.kv_heads} is not divisible by tensor={size}; choose tensor from "
        f"{', '.join(map(str, divisors(attention.kv_heads)))}",
    )
    attention.heads, attention.kv_heads = attention.heads // size, attention.kv_heads // size
    plan: TensorPlan = {name: ColwiseParallel() for name in projections} | {"o_proj": RowwiseParallel()}
    if isinstance(attention.gate, Gate):
        attention.gate.heads //= size
        plan["gate.proj"] = ColwiseParallel()
    for name, norm in norms.items():
        if list(norm.parameters()):  # one weight for all heads: its gradient is a sum over the heads of all processes
            plan[name] = SequenceParallel(sequence_dim=1, use_local_output=True)
    return plan


def feedforward_plan(module: FeedForwardModule | GatedModule, size: int) -> TensorPlan:
    names = [name for name in ("gate_proj", "up_proj", "down_proj") if hasattr(module, name)]
    if module.dropout > 0 or any(type(getattr(module, name)) is not nn.Linear for name in names):
        return {}
    assert isinstance(module.down_proj, nn.Linear), "checked above"
    hidden = module.down_proj.in_features
    require(
        hidden % size == 0,
        f"parallel: the hidden width {hidden} of a feed-forward layer is not divisible by tensor={size}; choose tensor "
        f"from {', '.join(map(str, divisors(hidden)))}",
    )
    return {name: ColwiseParallel() for name in names} | {"down_proj": RowwiseParallel()}


def vocabulary_plan(decoder: DecoderModule, size: int) -> TensorPlan:
    plain = type(decoder.head) is nn.Linear and type(decoder.embedding) is nn.Embedding
    if not plain or decoder.spec.vocab % size:
        return {}
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


class ShardedLogits(LazyLogits):
    """Lazy logits of a head whose weight and bias are DTensors, sharded by rows: one process has those of V / tensor
    tokens. The loss combines sums over these, so no process computes all logits (kernels/linear_cross_entropy.py)."""

    def materialize(self) -> Tensor:
        bias = None if self.bias is None else whole_tensor(self.bias)
        return LazyLogits(*self._replace(weight=whole_tensor(self.weight), bias=bias)).materialize()

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
