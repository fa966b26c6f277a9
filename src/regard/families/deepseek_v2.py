"""DeepSeek-V2 (2024): latent attention; softmax-routed experts, chosen in the groups with the best single expert.

transformers does not use `norm_topk_prob`, which would renormalize the weights of the chosen experts, so only the
published value is accepted.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.decoder import require_divisible
from regard.families.common.latent_decoder import DEFAULTS as LATENT_DEFAULTS
from regard.families.common.latent_decoder import latent_config, latent_table, read_latent_decoder
from regard.families.common.moe import mixer_and_experts
from regard.families.common.roundtrip import check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.latent_attention import LatentAttention
from regard.parts.router import Router
from regard.weights.table import Table

DEFAULTS = LATENT_DEFAULTS | {
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("deepseek_v2", DEFAULTS | config)
    hf_config.accept_only("scoring_func", "softmax")
    hf_config.accept_only("norm_topk_prob", False)
    groups, top_groups = 1, 1
    if hf_config.choice("topk_method", {"greedy": False, "group_limited_greedy": True}):
        groups, top_groups = hf_config.integer("n_group"), hf_config.integer("topk_group")
    scale = hf_config.number("routed_scaling_factor")
    router = Router(renormalize=False, scale=scale, groups=groups, top_groups=top_groups, group_best=1)
    return read_latent_decoder(hf_config, "interleaved", router)


def config(model: Decoder) -> dict[str, Any]:
    attention, experts = mixer_and_experts(model, LatentAttention)
    require_divisible("deepseek_v2", model, attention.heads)
    settings = latent_config("deepseek_v2", "DeepseekV2ForCausalLM", model) | {
        "topk_method": "greedy" if experts.router.groups == 1 else "group_limited_greedy",
        "mlp_bias": getattr(experts.shared, "bias", False),
    }
    return check_roundtrip("deepseek_v2", model, settings, spec)


def table(model: Decoder) -> Table:
    return latent_table(model)
