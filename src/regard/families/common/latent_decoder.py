"""DeepSeek's decoders: latent attention; a few dense layers, then layers of routed and shared experts.

YaRN's `mscale_all_dim` also scales the scores, in addition to the amplitude of the rope. transformers has no balance
loss for these models, so none is added.
"""

from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.moe import EXPERTS, dense_layers, mixer_and_experts
from regard.families.common.names import ATTENTION, FEEDFORWARD
from regard.families.common.rope_config import read_rope, rope_parameters
from regard.families.common.roundtrip import bodies
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import PairLayout
from regard.parts.position.rope_scaling import Yarn
from regard.parts.router import Router
from regard.weights.ops import Reshape, Split
from regard.weights.table import Link, Table

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,  # null: queries are projected from the full width
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def read_latent_decoder(hf_config: Config, layout: PairLayout, router: Router) -> Decoder:
    hf_config.accept_only("moe_layer_freq", 1)
    bias, hidden = hf_config.flag("mlp_bias", False), hf_config.integer("moe_intermediate_size")
    experts = Experts(
        hf_config.integer("n_routed_experts"),
        hf_config.integer("num_experts_per_tok"),
        SwiGLU(hidden),
        shared=SwiGLU(hidden * hf_config.integer("n_shared_experts"), bias=bias),
        router=router,
        balance=0.0,
    )
    attention, depth = read_latent_attention(hf_config, layout), hf_config.integer("num_hidden_layers")
    dense = min(hf_config.integer("first_k_dense_replace"), depth)
    runs = (decoder.read_swiglu(hf_config, bias), dense), (experts, depth - dense)
    layers = (Repeat((decoder.pre_norm_block(hf_config, attention, body),), times) for body, times in runs if times)
    return decoder.read_decoder(hf_config, tuple(layers))


def read_latent_attention(hf_config: Config, layout: PairLayout) -> LatentAttention:
    heads = hf_config.integer("num_attention_heads")
    hf_config.accept_only("num_key_value_heads", heads)
    nope_dim, rope_dim = hf_config.integer("qk_nope_head_dim"), hf_config.integer("qk_rope_head_dim")
    position, scale = read_rope(hf_config, layout=layout), None
    if isinstance(position.scaling, Yarn) and position.scaling.mscale_all_dim:
        scale = max(nope_dim + rope_dim, 1) ** -0.5 * position.scaling.temperature(position.scaling.mscale_all_dim) ** 2
    return LatentAttention(
        heads=heads,
        rank=hf_config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=hf_config.integer("v_head_dim"),
        query_rank=hf_config.integer_or_none("q_lora_rank"),
        position=position,
        norm=RMSNorm(1e-6),  # transformers does not pass rms_norm_eps to these norms
        bias=hf_config.flag("attention_bias", False),
        scale=scale,
    )


def latent_config(model_type: str, architecture: str, model: Decoder) -> dict[str, Any]:
    (attention, experts), dense = mixer_and_experts(model, LatentAttention), dense_layers(model)
    feedforward = bodies(model.blocks[dense[0]], LatentAttention, SwiGLU)[1] if dense else experts.expert
    hidden = experts.expert.hidden_dim(model.width)
    shared = 0 if experts.shared is None else experts.shared.hidden_dim(model.width)
    return decoder.decoder_config(model_type, architecture, model) | {
        "intermediate_size": feedforward.hidden_dim(model.width),
        "first_k_dense_replace": len(dense),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "kv_lora_rank": attention.rank,
        "q_lora_rank": attention.query_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "attention_bias": attention.bias,
        "rope_parameters": rope_parameters(attention.position),
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": shared // hidden,
        "moe_intermediate_size": hidden,
        "routed_scaling_factor": experts.router.scale,
        "n_group": experts.router.groups,
        "topk_group": experts.router.top_groups,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
    }


def latent_table(model: Decoder) -> Table:
    attention, _ = bodies(model.blocks[0], LatentAttention, Body)
    foreign, ours = f"{decoder.LAYER}.self_attn", f"{ATTENTION}.body"
    query = "q_b_proj" if attention.query_rank else "q_proj"
    latent_and_key = (f"{ours}.latent_proj.{{leaf}}", f"{ours}.k_rope_proj.{{leaf}}")
    per_head = Split(groups=attention.heads), Reshape((-1, attention.rank))
    return Table(
        *decoder.EMBEDDING_AND_HEAD,
        *decoder.NORMS,
        decoder.FEEDFORWARD_PROJECTIONS,
        *EXPERTS,
        Link(f"{decoder.LAYER}.mlp.gate.e_score_correction_bias", f"{FEEDFORWARD}.body.router.correction"),
        Link(f"{decoder.LAYER}.mlp.shared_experts.{{proj}}.{{leaf}}", f"{FEEDFORWARD}.body.shared.{{proj}}.{{leaf}}"),
        Link(f"{foreign}.{query}.weight", f"{ours}.q_proj.weight"),
        Link(f"{foreign}.q_a_proj.{{leaf}}", f"{ours}.q_latent_proj.{{leaf}}"),
        Link(f"{foreign}.q_a_layernorm.weight", f"{ours}.q_latent_norm.weight"),
        Link(f"{foreign}.kv_a_proj_with_mqa.{{leaf}}", latent_and_key, Split()),
        Link(f"{foreign}.kv_a_layernorm.weight", f"{ours}.latent_norm.weight"),
        Link(f"{foreign}.kv_b_proj.weight", (f"{ours}.k_up", f"{ours}.v_up"), *per_head),
        Link(f"{foreign}.o_proj.{{leaf}}", f"{ours}.o_proj.{{leaf}}"),
        ignored=(*decoder.IGNORED, f"model.layers.{len(model.blocks)}.{{path}}"),  # the layer of multi-token prediction
    )
