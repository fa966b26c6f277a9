"""mT5 (Xue et al. 2020): T5 version 1.1 for 101 languages; published models have an untied head without a scale."""

from typing import Any

from regard.families import t5
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import check_roundtrip
from regard.models.encoder_decoder import EncoderDecoder
from regard.weights.table import Table

DEFAULTS = t5.DEFAULTS | {
    "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu",
}  # fmt: skip


def spec(config: dict[str, Any]) -> EncoderDecoder:
    hf_config = Config("mt5", DEFAULTS | config)
    feedforward = t5.read_feedforward(hf_config)
    return t5.read_t5(hf_config, (feedforward,), (feedforward,), scaled=False)


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = t5.common_config("mt5", "MT5ForConditionalGeneration", model) | t5.feedforward_config(model)
    return check_roundtrip("mt5", model, settings, spec)


def table(model: EncoderDecoder) -> Table:
    return t5.table(model)
