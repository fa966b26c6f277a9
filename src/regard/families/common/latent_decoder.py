"""What both DeepSeeks share: latent attention, and experts, some of them for every token, above a few dense layers.

Where YaRN's settings say so, the scores are sharpened beside its own amplitude. The balance of their experts is not
learned by a loss in `transformers`, so none is added here.
"""

from typing import Any

from regard.families import llama
from regard.families.common.config_reader import Config
from regard.families.common.moe import EXPERTS, dense, sparse
from regard.families.common.rope_config import rope, rope_parameters
from regard.families.common.roundtrip import bodies
from regard.families.llama import ATTENTION, ENDS, FEEDFORWARD, IGNORED, LAYER, NORMS, PROJECTIONS
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
    "q_lora_rank": 1536,  # null: none
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def latent_decoder(theirs: Config, layout: PairLayout, router: Router) -> Decoder:
    theirs.only("moe_layer_freq", 1)
    bias, hidden = theirs.flag("mlp_bias", False), theirs.integer("moe_intermediate_size")
    experts = Experts(
        theirs.integer("n_routed_experts"),
        theirs.integer("num_experts_per_tok"),
        SwiGLU(hidden),
        shared=SwiGLU(hidden * theirs.integer("n_shared_experts"), bias=bias),
        router=router,
        balance=0.0,
    )
    mixer, depth = attention(theirs, layout), theirs.integer("num_hidden_layers")
    foot = min(theirs.integer("first_k_dense_replace"), depth)
    runs = (llama.feedforward(theirs, bias), foot), (experts, depth - foot)
    return llama.decoder(
        theirs, tuple(Repeat((llama.pre(theirs, mixer, inner),), times) for inner, times in runs if times)
    )


def attention(theirs: Config, layout: PairLayout) -> LatentAttention:
    heads = theirs.integer("num_attention_heads")
    theirs.only("num_key_value_heads", heads)
    nope_dim, rope_dim = theirs.integer("qk_nope_head_dim"), theirs.integer("qk_rope_head_dim")
    position, scale = rope(theirs, layout=layout), None
    if isinstance(position.scaling, Yarn) and position.scaling.mscale_all_dim:
        scale = (nope_dim + rope_dim) ** -0.5 * position.scaling.sharpened(position.scaling.mscale_all_dim) ** 2
    return LatentAttention(
        heads=heads,
        rank=theirs.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=theirs.integer("v_head_dim"),
        query_rank=theirs.integer("q_lora_rank") if theirs.has("q_lora_rank") else None,
        position=position,
        norm=RMSNorm(1e-6),  # whatever rms_norm_eps is
        bias=theirs.flag("attention_bias", False),
        scale=scale,
    )


def written(architecture: str, model_type: str, model: Decoder) -> dict[str, Any]:
    (mixer, experts), foot = sparse(model, LatentAttention), dense(model)
    inner = bodies(model.blocks[foot[0]], LatentAttention, SwiGLU)[1] if foot else experts.expert
    hidden = experts.expert.hidden_dim(model.width)
    shared = 0 if experts.shared is None else experts.shared.hidden_dim(model.width)
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": inner.hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "first_k_dense_replace": len(foot),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "kv_lora_rank": mixer.rank,
        "q_lora_rank": mixer.query_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
        "attention_bias": mixer.bias,
        "rope_parameters": rope_parameters(mixer.position),
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
        "tie_word_embeddings": model.tied,
    }


def latent_table(model: Decoder) -> Table:
    (mixer, _), theirs, ours = bodies(model.blocks[0], LatentAttention, Body), f"{LAYER}.self_attn", f"{ATTENTION}.body"
    query = "q_b_proj" if mixer.query_rank else "q_proj"
    return Table(
        *ENDS,
        *NORMS,
        *PROJECTIONS[1:],
        *EXPERTS,
        Link(f"{LAYER}.mlp.gate.e_score_correction_bias", f"{FEEDFORWARD}.body.router.correction"),
        Link(f"{LAYER}.mlp.shared_experts.{{proj}}.{{leaf}}", f"{FEEDFORWARD}.body.shared.{{proj}}.{{leaf}}"),
        Link(f"{theirs}.{query}.weight", f"{ours}.q_proj.weight"),
        Link(f"{theirs}.q_a_proj.{{leaf}}", f"{ours}.q_latent_proj.{{leaf}}"),
        Link(f"{theirs}.q_a_layernorm.weight", f"{ours}.q_latent_norm.weight"),
        Link(
            f"{theirs}.kv_a_proj_with_mqa.{{leaf}}",
            (f"{ours}.latent_proj.{{leaf}}", f"{ours}.k_rope_proj.{{leaf}}"),
            Split(),
        ),
        Link(f"{theirs}.kv_a_layernorm.weight", f"{ours}.latent_norm.weight"),
        Link(
            f"{theirs}.kv_b_proj.weight",
            (f"{ours}.k_up", f"{ours}.v_up"),
            Split(groups=mixer.heads),
            Reshape((-1, mixer.rank)),
        ),
        Link(f"{theirs}.o_proj.{{leaf}}", f"{ours}.o_proj.{{leaf}}"),
        ignored=(*IGNORED, f"model.layers.{len(model.blocks)}.{{path}}"),  # it looks a token further ahead, in training
    )
