"""LED (Beltagy et al. 2020): BART for long sources, its encoder in Longformer's windows.

A config does not say which tokens are global: every call of theirs may, and where none does there are none. So it is
here; a spec with `Longformer(window, globals)` in the place of its windows has the same weights.
"""

from typing import Any

from regard.families import bart, longformer
from regard.families.common.config_reader import Config
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
from regard.weights.table import Table

DEFAULTS = bart.DEFAULTS | {"max_encoder_position_embeddings": 16384, "max_decoder_position_embeddings": 1024}
READING = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
READING |= {name: f"of_globals.{proj}" for name, proj in longformer.PROJECTIONS.items()}


def spec(config: dict[str, Any]) -> EncoderDecoder:
    theirs = Config("led", DEFAULTS | config)
    width, vocab, tied = theirs.integer("d_model"), theirs.integer("vocab_size"), theirs.flag("tie_word_embeddings")
    places = [Learned(theirs.integer(f"max_{side}_position_embeddings")) for side in ("encoder", "decoder")]
    norm, (_, write) = LayerNorm(), bart.layers(theirs, "post")
    return EncoderDecoder(
        Encoder(Tokens(vocab), width, layers(theirs), places[0], embedding_norm=norm),
        Decoder(vocab, width, write, places[1], NoNorm(), tied, embedding_norm=norm, head_bias=True),
        shared=tied,  # untied, theirs has three tables of words
    )


def layers(theirs: Config) -> bart.Layers:
    heads, runs = theirs.integer("encoder_attention_heads"), longformer.sides(theirs, theirs.integer("encoder_layers"))
    mixers = [(GlobalAttention(heads, mask=Window(side, causal=False), bias=True), times) for side, times in runs]
    return tuple(Repeat((bart.block(theirs, "encoder", "post", mixer),), times) for mixer, times in mixers)


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = bart.settings(model)
    mixers = [require_type(block.sublayers[0].body, GlobalAttention) for block in model.source.blocks]
    written = settings | {
        "model_type": "led",
        "architectures": ["LEDForConditionalGeneration"],
        "attention_window": [2 * require_type(mixer.mask, Window).size for mixer in mixers],
        "max_encoder_position_embeddings": require_type(model.source.position, Learned).length,
        "max_decoder_position_embeddings": require_type(model.target.position, Learned).length,
    }
    return check_roundtrip("led", model, written, spec)


def table(model: EncoderDecoder) -> Table:
    reading = {f"longformer_self_attn.{name}": proj for name, proj in READING.items()} | {"output": "o_proj"}
    return bart.tables(model, "led", *bart.feet("led"), reading=reading)
