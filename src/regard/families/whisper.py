"""Whisper (Radford et al. 2022): two convolutions over a spectrogram, then a pre-norm encoder-decoder that writes text.

Keys have no bias. The encoder's positions are stored sinusoids (with another spacing than in Vaswani et al. 2017) that
are not trained; the decoder's are learned. Suppressed and forced tokens are options of generation. Dropout and
SpecAugment are options of training and are not converted.
"""

from typing import Any

from regard.families import bart
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.families.pegasus import FINAL_NORMS
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
EMBEDDING = "model.decoder.embed_tokens.weight"


def spec(config: dict[str, Any]) -> EncoderDecoder:
    hf_config = Config("whisper", DEFAULTS | config)
    hf_config.accept_only("scale_embedding", False)
    width, norm = hf_config.integer("d_model"), LayerNorm()
    encoder = bart.encoder_layers(hf_config, "pre", key_bias=False)
    decoder = bart.decoder_layers(hf_config, "pre", key_bias=False)
    source = Learned(hf_config.integer("max_source_positions"), frozen=True)
    target = Learned(hf_config.integer("max_target_positions"))
    return EncoderDecoder(
        Encoder(Frames(hf_config.integer("num_mel_bins")), width, encoder, source, norm=norm),
        Decoder(hf_config.integer("vocab_size"), width, decoder, target, norm, hf_config.flag("tie_word_embeddings")),
    )


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = bart.common_config("whisper", "WhisperForConditionalGeneration", model) | {
        "num_mel_bins": require_type(model.source.input, Frames).channels,
        "max_source_positions": require_type(model.source.position, Learned).length,
        "max_target_positions": require_type(model.target.position, Learned).length,
    }
    return check_roundtrip("whisper", model, settings, spec)


def table(model: EncoderDecoder) -> Table:
    return Table(
        Link("model.encoder.conv1.{leaf}", "source.input.convolutions.0.{leaf}"),
        Link("model.encoder.conv2.{leaf}", "source.input.convolutions.1.{leaf}"),
        Link("model.encoder.embed_positions.weight", "source.position.table.weight"),
        Link("model.decoder.embed_positions.weight", "target.position.table.weight"),
        Link(EMBEDDING, "target.embedding.weight"),
        *bart.stack_links("model", "encoder", "self_attn"),
        *bart.stack_links("model", "decoder", "self_attn", "encoder_attn"),
        *FINAL_NORMS,
        Link("proj_out.weight", "target.head.weight"),
        prefix="model.",
        derived={"proj_out.weight": EMBEDDING} if model.target.tied else {},
    )
