"""The plan of tensor parallelism: which matrices are split over processes that hold the same tokens, and how.

    attention      W_q, W_k, W_v by heads, W_o by its columns            head h is computed by one process
    feed-forward   W_up, W_gate by rows, W_down by columns               one sum over processes per body
    embedding      by rows, together with the head, if the vocabulary    each process has the logits of V / size tokens
                   can be divided

Shoeybi et al. 2019 (Megatron-LM). The plan follows from the types of the parts. Parts without a plan (recurrent mixers,
norms, adapted projections) are computed by every process in full, which is exact, but saves nothing.
"""

from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn

from regard.models.decoder import DecoderModule
from regard.parts.attention import AttentionModule, Gate
from regard.parts.cross_attention import CrossAttentionModule
from regard.parts.feedforward import FeedForwardModule, GatedModule
from regard.parts.position.base import PositionModule
from regard.parts.position.rope import RopeModule
from regard.parts.split_heads import divisors
from regard.spec import require

# outputs: each process computes a part of the outputs. inputs: each has a part of the inputs; the outputs are summed.
# heads: a weight for all heads, of which each process has a part. tokens: the rows of a part of the vocabulary. logits:
# the same rows, and the outputs of all processes are gathered.
MatrixSplit = Literal["outputs", "inputs", "heads", "tokens", "logits"]
TensorPlan = dict[str, MatrixSplit]  # by the name of a submodule


def tensor_plans(
    model: nn.Module, size: int, linears: tuple[type[nn.Module], ...] = (nn.Linear,)
) -> dict[str, TensorPlan]:
    """The plans of all parts that have one, by the name of the part. ValueError if a part cannot be divided.

    linears: the types of projections that can be split; experts have their own.
    """
    shares_bias = any(
        type(module).share_bias is not PositionModule.share_bias
        for module in model.modules()
        if isinstance(module, PositionModule)
    )
    parts = ((path, plan_of(module, size, shares_bias, linears)) for path, module in model.named_modules())
    plans = {path: plan for path, plan in parts if plan}
    if isinstance(model, DecoderModule) and (plan := vocabulary_plan(model, size)):
        plans[""] = plan  # not in an encoder-decoder, whose source may share the table
    require(
        bool(plans),
        f"parallel: tensor={size}, but no part of this model can be distributed (attention without bias or sinks, "
        "feed-forward layers, the embedding); use shard to train it, and replicas to serve it",
    )
    return plans


def tied_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Every further name of a tied parameter, with its first name."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            yield name, first[parameter]


def plan_of(
    module: nn.Module, size: int, shares_bias: bool, linears: tuple[type[nn.Module], ...] = (nn.Linear,)
) -> TensorPlan:
    """The plan of a part; empty if it has none."""
    if type(module) in (AttentionModule, CrossAttentionModule):
        assert isinstance(module, AttentionModule)
        return {} if shares_bias else attention_plan(module, size)
    if isinstance(module, FeedForwardModule | GatedModule):
        return feedforward_plan(module, size, linears)
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
    plan: TensorPlan = {"q_proj": "outputs", "k_proj": "outputs", "v_proj": "outputs", "o_proj": "inputs"}
    if isinstance(attention.gate, Gate):
        plan["gate.proj"] = "outputs"
    return plan | {name: "heads" for name, norm in norms.items() if list(norm.parameters())}


def divide_heads(model: nn.Module, plans: dict[str, TensorPlan], size: int) -> set[AttentionModule]:
    """Count the heads of the attentions that have a plan per process from here on; returns these attentions."""
    parts = (model.get_submodule(path) for path in plans)
    divided = {part for part in parts if isinstance(part, AttentionModule)}
    for attention in divided:
        attention.heads, attention.kv_heads = attention.heads // size, attention.kv_heads // size
        if isinstance(attention.gate, Gate):
            attention.gate.heads //= size
    return divided


def feedforward_plan(
    module: FeedForwardModule | GatedModule, size: int, linears: tuple[type[nn.Module], ...]
) -> TensorPlan:
    names = [name for name in ("gate_proj", "up_proj", "down_proj") if hasattr(module, name)]
    if module.dropout > 0 or any(type(getattr(module, name)) not in linears for name in names):
        return {}
    weight = module.down_proj.weight
    assert isinstance(weight, Tensor), "checked above"
    hidden = weight.shape[-1]
    require(
        hidden % size == 0,
        f"parallel: the hidden width {hidden} of a feed-forward layer is not divisible by tensor={size}; choose tensor "
        f"from {', '.join(map(str, divisors(hidden)))}",
    )
    return {name: "inputs" if name == "down_proj" else "outputs" for name in names}


def vocabulary_plan(decoder: DecoderModule, size: int) -> TensorPlan:
    plain = type(decoder.head) is nn.Linear and type(decoder.embedding) is nn.Embedding
    return {"embedding": "tokens", "head": "logits"} if plain and decoder.spec.vocab % size == 0 else {}
