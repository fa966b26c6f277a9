"""Llama (Touvron et al. 2023): RMSNorm before every sublayer, grouped-query attention with RoPE, SwiGLU, no biases.

Many families have its keys and tensor names, so its functions are in common/decoder.py. Dropout is an option of
training and is not converted.
"""

from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import Gated
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("llama", config)
    feedforward = decoder.read_gated(hf_config, hf_config.flag("mlp_bias", False))
    return decoder.read_decoder(
        hf_config, decoder.pre_norm_block(hf_config, decoder.read_attention(hf_config), feedforward)
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, Gated)
    decoder.require_divisible("llama", model, attention.heads)
    settings = decoder.llama_config("llama", "LlamaForCausalLM", model, attention, feedforward)
    biases = {"attention_bias": attention.bias, "mlp_bias": feedforward.bias}
    return check_roundtrip("llama", model, settings | biases, spec)


def table(model: Decoder) -> Table:
    return decoder.LLAMA_TABLE
