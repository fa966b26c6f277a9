"""Zamba2 (Glorioso et al. 2024): Mamba-2 layers, some preceded by one of a few shared blocks of attention and GEGLU.

A shared block reads the hidden state concatenated with the embeddings; each layer that uses it has its own
low-rank adapters. Files have a shared block, with all its adapters, in the first layer that uses it. Dropout is an
option of training and is not converted.
"""

from dataclasses import replace
from itertools import count, groupby
from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.decoder import decoder_config, read_decoder
from regard.families.common.layer_types import output_projections
from regard.families.common.names import ATTENTION
from regard.families.common.rope_config import read_rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip, require_type
from regard.families.jamba import mamba_sizes
from regard.families.mamba2 import mixer_links
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated
from regard.parts.norm import NoNorm, RMSNorm
from regard.parts.position.base import NoPosition
from regard.parts.shared_block import SharedBlock
from regard.parts.ssm.mamba2 import Mamba2
from regard.weights.ops import Split
from regard.weights.table import Link, Table

LAYER = "model.layers.{i}"
SHARED_TRANSFORMER, SHARED_BLOCK = f"{LAYER}.shared_transformer", f"{ATTENTION}.body.block"
IS_HYBRID = {"mamba": False, "linear_attention": False, "hybrid": True}
DEFAULT_TYPES = ["hybrid" if letter == "h" else "mamba" for letter in "m" + "mmmmmh" * 7 + "mmmmh" + "mmmh" + "mm"]
GATE_UP = tuple(f"{SHARED_BLOCK}.feedforward.{proj}_proj.base.{{leaf}}" for proj in ("gate", "up"))
LINKS = (
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link(f"{LAYER}.input_layernorm.weight", f"{ATTENTION}.norm.weight"),
    Link(f"{LAYER}.mamba_decoder.input_layernorm.weight", f"{ATTENTION}.body.norm.weight"),
    Link(f"{LAYER}.mamba_decoder.mamba.out_proj.{{leaf}}", f"{ATTENTION}.body.mixer.o_proj.{{leaf}}"),
    Link(f"{SHARED_TRANSFORMER}.input_layernorm.weight", f"{SHARED_BLOCK}.attention_norm.weight"),
    Link(f"{SHARED_TRANSFORMER}.self_attn.{{proj}}.weight", f"{SHARED_BLOCK}.attention.{{proj}}.weight"),
    Link(f"{SHARED_TRANSFORMER}.self_attn.{{proj}}.weight", f"{SHARED_BLOCK}.attention.{{proj}}.base.weight"),
    Link(f"{SHARED_TRANSFORMER}.pre_ff_layernorm.weight", f"{SHARED_BLOCK}.feedforward_norm.weight"),
    Link(f"{SHARED_TRANSFORMER}.feed_forward.gate_up_proj.{{leaf}}", GATE_UP, Split()),
    Link(f"{SHARED_TRANSFORMER}.feed_forward.down_proj.{{leaf}}", f"{SHARED_BLOCK}.feedforward.down_proj.{{leaf}}"),
    Link("model.final_layernorm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("zamba2", config)
    hf_config.accept_only("use_long_context", False)
    hf_config.accept_only("tie_word_embeddings", True)  # with false, transformers does not share the blocks either
    norm, mamba = RMSNorm(hf_config.number("rms_norm_eps", 1e-5)), read_mamba2(hf_config)
    shared, numbers, mamba_block = read_shared_block(hf_config, mamba, norm), count(), Block((Sublayer(mamba, norm),))
    types = hf_config.list_of(str, "layers_block_type", DEFAULT_TYPES)
    blocks = max(hf_config.integer("num_mem_blocks", 1), 1)
    if len(types) != hf_config.integer("num_hidden_layers", 54) or not {"hybrid"} <= {*types} <= IS_HYBRID.keys():
        rule = "must have one entry per layer, 'mamba' or 'hybrid', at least one of them 'hybrid'"
        raise hf_config.error("layers_block_type", types, rule)
    layers = [
        Block((Sublayer(replace(shared, number=next(numbers) % blocks), NoNorm()),)) if IS_HYBRID[kind] else mamba_block
        for kind in types
    ]
    runs = tuple(Repeat((block,), len([*run])) for block, run in groupby(layers))
    return read_decoder(hf_config, runs, norm, tied=True, context=4096)


def read_shared_block(hf_config: Config, mamba: Mamba2, norm: RMSNorm) -> SharedBlock:
    width, heads = hf_config.integer("hidden_size"), hf_config.integer("num_attention_heads")
    head_dim = 2 * width // max(heads, 1)
    hf_config.accept_only("attention_head_dim", head_dim)
    position = read_rope(hf_config) if hf_config.flag("use_mem_rope", False) else NoPosition()
    kv_heads, scale = hf_config.integer("num_key_value_heads", heads), (max(head_dim, 1) / 2) ** -0.5
    rank, adapted = hf_config.integer("adapter_rank", 128), hf_config.flag("use_shared_attention_adapter", False)
    hf_config.accept_only("num_key_value_heads", heads if adapted else kv_heads)
    attention = Attention(heads, kv_heads, head_dim, position, scale=scale)
    hidden, activation = hf_config.integer("intermediate_size", 4 * width), hf_config.activation("hidden_act", "gelu")
    feedforward = Gated(hidden, activation, bias=hf_config.flag("add_bias_linear", False))
    return SharedBlock(attention, feedforward, mamba, 0, norm, rank if adapted else None, rank)


def read_mamba2(hf_config: Config) -> Mamba2:
    expand, groups = hf_config.integer("mamba_expand", 2), hf_config.integer("mamba_ngroups", 1)
    return Mamba2(
        state=hf_config.integer("mamba_d_state", 64),
        head_dim=expand * hf_config.integer("hidden_size") // max(hf_config.integer("n_mamba_heads", 8), 1),
        expand=expand,
        groups=groups,
        taps=hf_config.integer("mamba_d_conv", 4),
        bias=hf_config.flag("add_bias_linear", False),
        norm=RMSNorm(1e-5),
        norm_parts=groups,
        shortest=hf_config.number("time_step_min", 0.001) or None,
    )


def config(model: Decoder) -> dict[str, Any]:
    mixers = [bodies(block, object)[0] for block in model.blocks]
    shared = require_type(next((body for body in mixers if isinstance(body, SharedBlock)), mixers[0]), SharedBlock)
    attention, mamba = shared.attention, require_type(shared.mixer, Mamba2)
    settings = decoder_config("zamba2", "Zamba2ForCausalLM", model) | {
        "intermediate_size": shared.feedforward.hidden_dim(model.width),
        "layers_block_type": ["hybrid" if isinstance(body, SharedBlock) else "mamba" for body in mixers],
        "num_mem_blocks": len({body.number for body in mixers if isinstance(body, SharedBlock)}),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.sizes(2 * model.width)[1],
        "use_shared_attention_adapter": shared.attention_rank is not None,
        "adapter_rank": shared.rank or 1,
        "use_mem_rope": attention.position != NoPosition(),
        "rope_parameters": rope_parameters(attention.position),
        "hidden_act": ACTIVATION_NAMES[shared.feedforward.activation],
        "add_bias_linear": mamba.bias,
        **mamba_sizes(mamba),
        "n_mamba_heads": mamba.sizes(model.width)[0],
        "mamba_ngroups": mamba.groups,
        "time_step_min": mamba.shortest or 0.0,
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
        "tie_word_embeddings": True,
    }
    return check_roundtrip("zamba2", model, settings, spec)


def table(model: Decoder) -> Table:
    mixers = [block.sublayers[0].body for block in model.blocks]
    shared = {i: body for i, body in enumerate(mixers) if isinstance(body, SharedBlock)}
    firsts = {body.number: i for i, body in reversed(shared.items())}  # number of a block -> first layer with it
    adapters = [link for n, (i, body) in enumerate(shared.items()) for link in adapter_links(i, firsts[body.number], n)]
    groups = require_type(shared[firsts[0]].mixer, Mamba2).groups
    mixer_names = {"mamba": f"{ATTENTION}.body", "mamba_decoder.mamba": f"{ATTENTION}.body.mixer"}
    mambas = [link for name, ours in mixer_names.items() for link in mixer_links(f"{LAYER}.{name}", ours, groups)]
    outputs = output_projections(model, {Mamba2: "mamba.out_proj", SharedBlock: "linear"})
    return Table(*LINKS, *mambas, *outputs, *adapters, ignored=("lm_head.weight",))


def adapter_links(layer: int, first_layer: int, n: int) -> list[Link]:
    """The adapters of a layer, the n-th with a shared block; files have them in the first layer of that block."""
    ours, foreign = f"stack.blocks.{layer}.sublayers.0.body.block", f"model.layers.{first_layer}.shared_transformer"
    gate, up = (f"{ours}.feedforward.{proj}_proj.adapter" for proj in ("gate", "up"))
    fused = f"{foreign}.feed_forward.gate_up_proj_adapter_list.{n}"
    attention = f"{foreign}.self_attn.linear_{{p}}_adapter_list.{n}.{{path}}"
    return [
        Link(f"{fused}.0.weight", f"{gate}.0.weight"),
        Link(f"{fused}.1.weight", (f"{gate}.1.weight", f"{up}.1.weight"), Split()),
        Link(attention, f"{ours}.attention.{{p}}_proj.adapter.{{path}}"),
    ]
