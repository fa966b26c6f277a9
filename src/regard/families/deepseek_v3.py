"""DeepSeek-V3 (2024): V2 with sigmoid-routed experts; a correction per expert affects the choice, not the weights.

The layer of multi-token prediction, which serves training and speculation, is not read, as in `transformers`.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.latent_decoder import DEFAULTS as LATENT_DEFAULTS
from regard.families.common.latent_decoder import latent_config, latent_table, read_latent_decoder
from regard.families.common.moe import mixer_and_experts
from regard.families.common.roundtrip import check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.latent_attention import LatentAttention
from regard.parts.router import Router
from regard.weights.table import Table

DEFAULTS = LATENT_DEFAULTS | {
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
}


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("deepseek_v3", DEFAULTS | config)
    hf_config.accept_only("scoring_func", "sigmoid")
    hf_config.accept_only("topk_method", "noaux_tc")
    router = Router(
        scores="sigmoid",
        renormalize=hf_config.flag("norm_topk_prob"),
        scale=hf_config.number("routed_scaling_factor"),
        correction=True,
        groups=hf_config.integer("n_group"),
        top_groups=hf_config.integer("topk_group"),
        group_best=2,
    )
    return read_latent_decoder(hf_config, "interleaved" if hf_config.flag("rope_interleave") else "half", router)


def config(model: Decoder) -> dict[str, Any]:
    attention, experts = mixer_and_experts(model, LatentAttention)
    settings = latent_config("deepseek_v3", "DeepseekV3ForCausalLM", model) | {
        "norm_topk_prob": experts.router.renormalizes(experts.top_k),
        "rope_interleave": getattr(attention.position, "layout", None) == "interleaved",
    }
    return check_roundtrip("deepseek_v3", model, settings, spec)


def table(model: Decoder) -> Table:
    return latent_table(model)
