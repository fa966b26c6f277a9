"""DeepSeek-V2 (2024): latent attention; experts by softmax, whose groups are worth their best.

Whether the chosen experts' weights are brought to a sum of one is a setting that `transformers` passes over, so
only the published value is read.
"""

from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.latent_decoder import DEFAULTS as LATENT_DEFAULTS
from regard.families.common.latent_decoder import latent_decoder, latent_table, written
from regard.families.common.moe import sparse
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
    theirs = Config("deepseek_v2", DEFAULTS | config)
    theirs.only("scoring_func", "softmax")
    theirs.only("norm_topk_prob", False)
    groups, top_groups = 1, 1
    if theirs.choice("topk_method", {"greedy": False, "group_limited_greedy": True}):
        groups, top_groups = theirs.integer("n_group"), theirs.integer("topk_group")
    scale = theirs.number("routed_scaling_factor")
    router = Router(renormalize=False, scale=scale, groups=groups, top_groups=top_groups, group_best=1)
    return latent_decoder(theirs, "interleaved", router)


def config(model: Decoder) -> dict[str, Any]:
    mixer, experts = sparse(model, LatentAttention)
    if model.width % mixer.heads:
        raise FamilyError(f"transformers' deepseek_v2 wants width={model.width} divisible by heads={mixer.heads}")
    own = {
        "topk_method": "greedy" if experts.router.groups == 1 else "group_limited_greedy",
        "mlp_bias": getattr(experts.shared, "bias", False),
    }
    return check_roundtrip("deepseek_v2", model, written("DeepseekV2ForCausalLM", "deepseek_v2", model) | own, spec)


def table(model: Decoder) -> Table:
    return latent_table(model)
