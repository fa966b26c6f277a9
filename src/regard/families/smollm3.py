"""SmolLM3 (Bakouch et al. 2025): Llama without positions in every fourth layer; those without may have a window."""

from dataclasses import replace
from itertools import cycle
from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, arranged, by_window, every, layer_types, listed, window
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import TABLE, attention, decoder, feedforward, pre, written
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.parts.position.base import NoPosition
from regard.weights.table import Table

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("smollm3", DEFAULTS | config)
    mixer, inner = attention(theirs), feedforward(theirs, theirs.flag("mlp_bias", False))
    mixers = by_window(theirs, mixer) if theirs.flag("use_sliding_window") else {FULL: mixer}
    blocks = {(kind, 1): pre(theirs, mixer, inner) for kind, mixer in mixers.items()} | {
        (kind, 0): pre(theirs, replace(mixer, position=NoPosition()), inner) for kind, mixer in mixers.items()
    }
    turns = listed(theirs, "no_rope_layers", int, (1,) * (every(theirs, "no_rope_layer_interval", 4) - 1) + (0,))
    rule = tuple(SLIDING if SLIDING in mixers and not turn else FULL for turn in turns)
    kinds = listed(theirs, "layer_types", str, rule)
    return decoder(theirs, arranged(theirs, blocks, tuple(zip(kinds, cycle(turns), strict=False))))


def config(model: Decoder) -> dict[str, Any]:
    pairs = [bodies(block, Attention, SwiGLU) for block in model.blocks]
    mixers = [mixer for mixer, _ in pairs]
    mixer, inner = next((pair for pair in pairs if pair[0].position != NoPosition()), pairs[0])
    own = {
        "attention_bias": mixer.bias,
        "mlp_bias": inner.bias,
        "no_rope_layers": [int(mixer.position != NoPosition()) for mixer in mixers],
        "use_sliding_window": window(mixers) is not None,
        "sliding_window": window(mixers),
        "layer_types": layer_types(mixers),
    }
    return check_roundtrip("smollm3", model, written("SmolLM3ForCausalLM", "smollm3", model, mixer, inner) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE
