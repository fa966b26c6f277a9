"""GPTBigCode (Ben Allal et al. 2023, SantaCoder and StarCoder): GPT-2 with multi-query attention.

Its linear layers are stored as (out, in). Without `multi_query`, queries, keys and values are fused per head.
"""

from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gpt2 import common_config, common_table, read_gpt2
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import FeedForward
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("gpt_bigcode", config)
    return read_gpt2(hf_config, 1 if hf_config.flag("multi_query", True) else None, "gelu_pytorch_tanh")


def config(model: Decoder) -> dict[str, Any]:
    attention, _ = bodies(model.blocks[0], Attention, FeedForward)
    settings = common_config("gpt_bigcode", "GPTBigCodeForCausalLM", model, ACTIVATION_NAMES) | {
        "scale_attn_weights": attention.scale != 1.0,
        "multi_query": attention.sizes(model.width)[1] == 1,
    }
    return check_roundtrip("gpt_bigcode", model, settings, spec)


def table(model: Decoder) -> Table:
    attention, _ = bodies(model.layers[0].blocks[0], Attention, FeedForward)
    return common_table(groups=attention.sizes(model.width)[1])
