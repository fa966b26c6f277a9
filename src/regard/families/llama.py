"""Llama (Touvron et al. 2023): RMSNorm before every sublayer, grouped-query attention with RoPE, SwiGLU, no biases.

Many families have its keys and tensor names, so its functions are in common/decoder.py. Dropout is an option of
training and is not converted.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.decoder import (
    LLAMA_TABLE,
    llama_config,
    pre_norm_block,
    read_attention,
    read_decoder,
    read_swiglu,
    require_divisible,
)
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("llama", config)
    feedforward = read_swiglu(theirs, theirs.flag("mlp_bias", False))
    return read_decoder(theirs, pre_norm_block(theirs, read_attention(theirs), feedforward))


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, SwiGLU)
    require_divisible("llama", model, attention.heads)
    settings = llama_config("llama", "LlamaForCausalLM", model, attention, feedforward)
    biases = {"attention_bias": attention.bias, "mlp_bias": feedforward.bias}
    return check_roundtrip("llama", model, settings | biases, spec)


def table(model: Decoder) -> Table:
    return LLAMA_TABLE
