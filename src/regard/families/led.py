"""LED (Beltagy et al. 2020): BART for long inputs, with Longformer's windows in its encoder.

A config does not define which tokens are global. In transformers they are an argument of the forward, by default none;
here there are none. A spec with `Longformer(window, globals)` instead of the windows has the same weights.
"""

from typing import Any

from regard.families import bart, longformer
from regard.families.common.config_reader import Config
from regard.families.common.names import module_links
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.parts.global_attention import GlobalAttention
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

DEFAULTS = bart.DEFAULTS | {"max_encoder_position_embeddings": 16384, "max_decoder_position_embeddings": 1024}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
PROJECTIONS |= {name: f"of_globals.{proj}" for name, proj in longformer.GLOBAL_PROJECTIONS.items()}


def spec(config: dict[str, Any]) -> EncoderDecoder:
    hf_config = Config("led", DEFAULTS | config)
    width = hf_config.integer("d_model")
    vocab = hf_config.integer("vocab_size")
    tied = hf_config.flag("tie_word_embeddings")
    source, target = (Learned(hf_config.integer(f"max_{side}_position_embeddings")) for side in ("encoder", "decoder"))
    norm, decoder = LayerNorm(), bart.decoder_layers(hf_config, "post")
    return EncoderDecoder(
        Encoder(Tokens(vocab), width, encoder_layers(hf_config), source, embedding_norm=norm),
        Decoder(vocab, width, decoder, target, NoNorm(), tied, embedding_norm=norm, head_bias=True),
        shared=tied,  # an untied checkpoint has three embedding tables
    )


def encoder_layers(hf_config: Config) -> bart.Layers:
    heads, layers = hf_config.integer("encoder_attention_heads"), []
    for side, times in longformer.window_runs(hf_config, hf_config.integer("encoder_layers")):
        attention = GlobalAttention(heads, mask=Window(side, causal=False), bias=True)
        layers.append(Repeat((bart.read_block(hf_config, "encoder", "post", attention),), times))
    return tuple(layers)


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = bart.common_config("led", "LEDForConditionalGeneration", model)
    attentions = [require_type(block.sublayers[0].body, GlobalAttention) for block in model.source.blocks]
    settings |= {
        "attention_window": [2 * require_type(attention.mask, Window).size for attention in attentions],
        "max_encoder_position_embeddings": require_type(model.source.position, Learned).length,
        "max_decoder_position_embeddings": require_type(model.target.position, Learned).length,
    }
    return check_roundtrip("led", model, settings, spec)


def table(model: EncoderDecoder) -> Table:
    return bart.common_table(model, "led", *bart.embedding_links("led"), *encoder_links())


def encoder_links() -> tuple[Link, ...]:
    layer, ours = "led.encoder.layers.{i}", "source.stack.blocks.{i}.sublayers"
    names = {f"self_attn.longformer_self_attn.{name}": f"{ours}.0.body.{proj}" for name, proj in PROJECTIONS.items()}
    names |= {"self_attn.output": f"{ours}.0.body.o_proj", "self_attn_layer_norm": f"{ours}.0.norm"}
    return *module_links(layer, names), *bart.feedforward_links(layer, f"{ours}.1")
