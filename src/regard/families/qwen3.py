"""Qwen3 (Yang et al. 2025): Qwen2 with a norm of every query and key instead of biases."""

from dataclasses import replace
from typing import Any

from regard.families import qwen2
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import ENDS, IGNORED, NORMS, PROJECTIONS, QK_NORMS, attention, decoder, norm
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.weights.table import Table

DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128}
TABLE = Table(*ENDS, *PROJECTIONS, *NORMS, *QK_NORMS, prefix="model.", ignored=IGNORED)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("qwen3", DEFAULTS | config)
    return decoder(theirs, qwen2.layers(theirs, replace(attention(theirs), qk_norm=norm(theirs))))


def config(model: Decoder) -> dict[str, Any]:
    mixer, _ = bodies(model.blocks[0], Attention, SwiGLU)
    own = {"attention_bias": mixer.bias}
    return check_roundtrip("qwen3", model, qwen2.windowed("Qwen3ForCausalLM", "qwen3", model) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE
