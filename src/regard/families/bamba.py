"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 layers and a few attention layers, each followed by SwiGLU.

RoPE rotates half of each attention head. Dropout and the z loss are options of training and are not converted.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.decoder import decoder_config, head_config, read_attention, read_decoder, read_swiglu
from regard.families.common.layer_types import first_of_type, output_projections
from regard.families.common.names import ATTENTION
from regard.families.common.rope_config import read_rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.jamba import IGNORED, LINKS, mamba_sizes
from regard.families.mamba2 import mixer_links, read_step_limits, time_step_limit
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import RMSNorm
from regard.parts.ssm.mamba2 import Mamba2
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    # transformers reads partial_rotary_factor inside rope_parameters only.
    hf_config = Config("bamba", config | {"partial_rotary_factor": None})
    norm = RMSNorm(hf_config.number("rms_norm_eps", 1e-5))
    feedforward = read_swiglu(hf_config, hf_config.flag("mlp_bias", False))
    attention = read_attention(hf_config, read_rope(hf_config, share=0.5), kv_heads=8)
    with_attention, with_mamba = (
        Block((Sublayer(mixer, norm), Sublayer(feedforward, norm)))
        for mixer in (attention, read_mamba2(hf_config, norm))
    )
    return read_decoder(hf_config, read_layers(hf_config, with_mamba, with_attention), norm, context=262144)


def read_mamba2(hf_config: Config, norm: RMSNorm) -> Mamba2:
    expand = hf_config.integer("mamba_expand", 2)
    head_dim = expand * hf_config.integer("hidden_size") // max(hf_config.integer("mamba_n_heads", 128), 1)
    if hf_config.values.get("mamba_d_head") != "auto":
        hf_config.accept_only("mamba_d_head", head_dim)
    shortest, longest = read_step_limits(hf_config)
    return Mamba2(
        state=hf_config.integer("mamba_d_state", 256),
        head_dim=head_dim,
        expand=expand,
        groups=hf_config.integer("mamba_n_groups", 1),
        taps=hf_config.integer("mamba_d_conv", 4),
        bias=hf_config.flag("mamba_proj_bias", False),
        conv_bias=hf_config.flag("mamba_conv_bias", True),
        norm=norm,
        shortest=shortest,
        longest=longest,
    )


def read_layers(hf_config: Config, with_mamba: Block, with_attention: Block) -> tuple[Repeat, ...]:
    """Attention in the layers of `attn_layer_indices`, Mamba-2 in all others."""
    depth = hf_config.integer("num_hidden_layers")
    indices = tuple(sorted({*hf_config.list_of(int, "attn_layer_indices", ())}))
    if indices and not 0 <= indices[0] <= indices[-1] < depth:
        raise hf_config.error("attn_layer_indices", indices, f"must be from 0 to {depth - 1}")
    runs = []
    for previous, index in zip((-1, *indices), (*indices, depth), strict=True):
        runs += [Repeat((with_mamba,), index - previous - 1)] if index - previous > 1 else []
        runs += [Repeat((with_attention,))] if index < depth else []
    return tuple(runs)


def config(model: Decoder) -> dict[str, Any]:
    mixers, feedforwards = zip(*(bodies(block, Body, SwiGLU) for block in model.blocks), strict=True)
    attention = first_of_type(mixers, Attention, Attention(1))
    mamba = first_of_type(mixers, Mamba2, Mamba2(head_dim=1))
    settings = decoder_config("bamba", "BambaForCausalLM", model) | {
        "intermediate_size": feedforwards[0].hidden_dim(model.width),
        **head_config(model, attention),
        "attn_layer_indices": [i for i, body in enumerate(mixers) if isinstance(body, Attention)],
        "rope_parameters": rope_parameters(attention.position, share=0.5),
        "attention_bias": attention.bias,
        "mlp_bias": feedforwards[0].bias,
        "mamba_n_heads": mamba.sizes(model.width)[0],
        "mamba_d_head": mamba.head_dim,
        **mamba_sizes(mamba),
        "mamba_n_groups": mamba.groups,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        "time_step_limit": time_step_limit(mamba),
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
    }
    return check_roundtrip("bamba", model, settings, spec)


def table(model: Decoder) -> Table:
    outputs = output_projections(model, {Attention: "self_attn.o_proj", Mamba2: "mamba.out_proj"})
    return Table(*LINKS, *mixer_links("model.layers.{i}.mamba", f"{ATTENTION}.body"), *outputs, ignored=IGNORED)
