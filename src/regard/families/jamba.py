"""Jamba (Lieber et al. 2024): Mamba with an attention every few layers, and experts every few; no positions at all.

Δ's low rank, B and C are normalized. Which layer is which follows from periods and offsets. Dropout is a choice of the
training run and is not taken over.
"""

import math
from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.hybrid import first, last, sizes
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.mamba import mixer, rank
from regard.models.decoder import Decoder
from regard.models.stack import tiled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import RMSNorm
from regard.parts.router import Router
from regard.parts.ssm.mamba import Mamba
from regard.weights.ops import StackTensors
from regard.weights.table import Link, Table

MIXER, FEEDFORWARD = "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"
IGNORED = ("lm_head.weight",)  # where it is tied
LONGEST = 256  # layers after which an order may begin anew

LINKS = (
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link("model.layers.{i}.input_layernorm.weight", f"{MIXER}.norm.weight"),
    *(Link(f"model.layers.{{i}}.self_attn.{p}_proj.{{leaf}}", f"{MIXER}.body.{p}_proj.{{leaf}}") for p in "qkv"),
    Link("model.layers.{i}.pre_ff_layernorm.weight", f"{FEEDFORWARD}.norm.weight"),
    Link("model.layers.{i}.feed_forward.{proj}.{leaf}", f"{FEEDFORWARD}.body.{{proj}}.{{leaf}}"),
    Link("model.final_layernorm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
)  # of Bamba too
INNER = tuple(
    Link(f"model.layers.{{i}}.mamba.{theirs}_layernorm.weight", f"{MIXER}.body.{ours}_norm.weight")
    for theirs, ours in {"dt": "rank", "b": "b", "c": "c"}.items()
)
EXPERTS = (
    Link("model.layers.{i}.feed_forward.router.weight", f"{FEEDFORWARD}.body.router.proj.weight"),
    Link(
        "model.layers.{i}.feed_forward.experts.{each}.{proj}.weight",
        f"{FEEDFORWARD}.body.experts.{{proj}}.weight",
        StackTensors(),
    ),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("jamba", config)
    theirs.only("hidden_act", "silu")
    norm = RMSNorm(theirs.number("rms_norm_eps", 1e-6))
    attention = Attention(theirs.integer("num_attention_heads"), theirs.integer("num_key_value_heads", 8))
    mamba = Mamba(
        state=theirs.integer("mamba_d_state", 16),
        expand=theirs.integer("mamba_expand", 2),
        rank=rank(theirs, "mamba_dt_rank"),
        taps=theirs.integer("mamba_d_conv", 4),
        bias=theirs.flag("mamba_proj_bias", False),
        conv_bias=theirs.flag("mamba_conv_bias", True),
        norm=norm,
    )
    dense = SwiGLU(theirs.integer("intermediate_size"))
    count, feedforwards = theirs.integer("num_experts", 16), [dense]
    if count != 1:
        top_k, balance = theirs.integer("num_experts_per_tok", 2), theirs.number("router_aux_loss_coef", 0.001)
        experts = Experts(count, top_k, dense, router=Router(renormalize=False), balance=balance)
        feedforwards = every(theirs, "expert_layer", 2, 1, experts, dense)
    mixers = every(theirs, "attn_layer", 8, 4, attention, mamba)
    period = math.lcm(len(mixers), len(feedforwards))
    pairs = zip(mixers * (period // len(mixers)), feedforwards * (period // len(feedforwards)), strict=True)
    blocks = tuple(Block((Sublayer(mixer, norm), Sublayer(feedforward, norm))) for mixer, feedforward in pairs)
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=theirs.integer("hidden_size"),
        layers=tiled(blocks, theirs.integer("num_hidden_layers")),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", False),
        context=theirs.integer("max_position_embeddings", 262144),
    )


def every(theirs: Config, key: str, period: int, offset: int, rare: Body, usual: Body) -> list[Body]:
    """What stands in one period: once the rare body, else the usual one."""
    period, offset = theirs.integer(f"{key}_period", period), theirs.integer(f"{key}_offset", offset)
    if not 0 <= offset < period <= LONGEST:
        raise FamilyError(f"{theirs.model_type}: {key}_offset={offset} and {key}_period={period} should ascend from 0")
    return [rare if i == offset else usual for i in range(period)]


def config(model: Decoder) -> dict[str, Any]:
    mixers, feedforwards = zip(*(bodies(block, Body, Body) for block in model.blocks), strict=True)
    attention, mamba = first(mixers, Attention, Attention(1)), first(mixers, Mamba, Mamba())
    dense = first(feedforwards, SwiGLU, SwiGLU())
    experts = first(feedforwards, Experts, Experts(1, 1, dense))
    written = {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": first((experts.expert,), SwiGLU, dense).hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.sizes(model.width)[1],
        **places("attn_layer", [isinstance(body, Attention) for body in mixers]),
        **sizes(mamba),
        "mamba_dt_rank": mamba.rank or "auto",
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.balance,
        **places("expert_layer", [isinstance(body, Experts) for body in feedforwards]),
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("jamba", model, written, spec)


def places(key: str, there: list[bool]) -> dict[str, int]:
    """The period and the offset of what stands in these layers, if any do it."""
    found = [i for i, yes in enumerate(there) if yes] or [len(there)]
    period = found[1] - found[0] if len(found) > 1 else max(len(there), found[0] + 1)
    return {f"{key}_period": period, f"{key}_offset": found[0] % period}


def table(model: Decoder) -> Table:
    links = (*LINKS, *mixer("model.layers.{i}.mamba", f"{MIXER}.body"), *INNER, *EXPERTS)
    return Table(*links, *last(model, {Attention: "self_attn.o_proj", Mamba: "mamba.out_proj"}), ignored=IGNORED)
