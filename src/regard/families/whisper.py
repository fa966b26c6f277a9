"""Whisper (Radford et al. 2022): two convolutions over a spectrogram, then a pre-norm encoder-decoder of text.

Keys have no bias. The encoder's positions are sinusoids (of another spacing than 2017's) that are stored and not
trained, the decoder's are learned. Which tokens are suppressed or forced is a matter of generation. Dropout and
SpecAugment are choices of the training run and are not taken over.
"""

from typing import Any

from regard.families import bart
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.families.pegasus import NORMS
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.parts.frames import Frames
from regard.parts.norm import LayerNorm
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

DEFAULTS = bart.DEFAULTS | {
    "vocab_size": 51865, "num_mel_bins": 80, "d_model": 384, "max_source_positions": 1500, "max_target_positions": 448,
    "encoder_layers": 4, "encoder_ffn_dim": 1536, "encoder_attention_heads": 6,
    "decoder_layers": 4, "decoder_ffn_dim": 1536, "decoder_attention_heads": 6,
}  # fmt: skip
WORDS = "model.decoder.embed_tokens.weight"


def spec(config: dict[str, Any]) -> EncoderDecoder:
    theirs = Config("whisper", DEFAULTS | config)
    theirs.only("scale_embedding", False)
    width, norm, (read, write) = theirs.integer("d_model"), LayerNorm(), bart.layers(theirs, "pre", key_bias=False)
    heard = Learned(theirs.integer("max_source_positions"), frozen=True)
    said = Learned(theirs.integer("max_target_positions"))
    return EncoderDecoder(
        Encoder(Frames(theirs.integer("num_mel_bins")), width, read, heard, norm=norm),
        Decoder(theirs.integer("vocab_size"), width, write, said, norm, theirs.flag("tie_word_embeddings")),
    )


def config(model: EncoderDecoder) -> dict[str, Any]:
    written = bart.settings(model) | {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "num_mel_bins": require_type(model.source.input, Frames).channels,
        "max_source_positions": require_type(model.source.position, Learned).length,
        "max_target_positions": require_type(model.target.position, Learned).length,
    }
    return check_roundtrip("whisper", model, written, spec)


def table(model: EncoderDecoder) -> Table:
    return Table(
        Link("model.encoder.conv1.{leaf}", "source.input.convolutions.0.{leaf}"),
        Link("model.encoder.conv2.{leaf}", "source.input.convolutions.1.{leaf}"),
        Link("model.encoder.embed_positions.weight", "source.position.table.weight"),
        Link("model.decoder.embed_positions.weight", "target.position.table.weight"),
        Link(WORDS, "target.embedding.weight"),
        *bart.links("model.encoder", "source", 1),
        *bart.links("model.decoder", "target", 2),
        *bart.attention("model.decoder.layers.{i}.encoder_attn", "target.stack.blocks.{i}.sublayers.1"),
        *NORMS,
        Link("proj_out.weight", "target.head.weight"),
        prefix="model.",
        derived={"proj_out.weight": WORDS} if model.target.tied else {},
    )
