"""Qwen2 (Yang et al. 2024): Llama with biases on queries, keys and values, and windows above some depth."""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, arranged, by_window, layer_types, listed, window
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import TABLE, attention, decoder, feedforward, pre, written
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.weights.table import Table

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,  # those that have no window
}


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("qwen2", DEFAULTS | config)
    return decoder(theirs, layers(theirs, replace(attention(theirs), bias=True, out_bias=False)))


def config(model: Decoder) -> dict[str, Any]:
    return check_roundtrip("qwen2", model, windowed("Qwen2ForCausalLM", "qwen2", model), spec)


def table(model: Decoder) -> Table:
    return TABLE


def layers(theirs: Config, mixer: Attention) -> tuple[Repeat, ...]:
    mixers = by_window(theirs, mixer) if theirs.flag("use_sliding_window") else {FULL: mixer}
    blocks = {kind: pre(theirs, mixer, feedforward(theirs)) for kind, mixer in mixers.items()}
    if kinds := listed(theirs, "layer_types", str, ()):
        return arranged(theirs, blocks, kinds)
    depth = theirs.integer("num_hidden_layers")
    without = min(max(theirs.integer("max_window_layers"), 0), depth) if SLIDING in blocks else depth
    runs = {FULL: without, SLIDING: depth - without}
    return tuple(Repeat((blocks[kind],), times) for kind, times in runs.items() if times)


def windowed(architecture: str, model_type: str, model: Decoder) -> dict[str, Any]:
    """What Qwens write."""
    pairs = [bodies(block, Attention, SwiGLU) for block in model.blocks]
    mixers = [mixer for mixer, _ in pairs]
    return written(architecture, model_type, model, *pairs[0]) | {
        "use_sliding_window": window(mixers) is not None,
        "sliding_window": window(mixers),
        "layer_types": layer_types(mixers),
    }
