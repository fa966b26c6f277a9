"""mT5 (Xue et al. 2020): T5 version 1.1 for 101 languages. Its head is its own in published files, and never scaled."""

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
    theirs = Config("mt5", DEFAULTS | config)
    body = t5.feedforward(theirs)
    return t5.stacks(theirs, (body,), (body,), scaled=False)


def config(model: EncoderDecoder) -> dict[str, Any]:
    names = {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
    return check_roundtrip("mt5", model, names | t5.settings(model) | t5.body(model), spec)


def table(model: EncoderDecoder) -> Table:
    return t5.table(model)
