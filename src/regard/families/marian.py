"""Marian (Junczys-Dowmunt et al. 2018), the OPUS translators: Vaswani et al.'s model, all sines before all cosines.

The two languages share an embedding table, or have tables of different sizes. The logits have a bias. Published files
contain the sinusoids: they are compared with ours and not loaded.
"""

from typing import Any

import torch
from torch import Tensor

from regard.families import bart
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.parts.input import Tokens
from regard.parts.norm import NoNorm
from regard.parts.position.sinusoidal import Sinusoidal, sinusoidal_embeddings
from regard.weights.table import Table

DEFAULTS = bart.DEFAULTS | {"vocab_size": 58101, "share_encoder_decoder_embeddings": True}
POSITION = Sinusoidal(layout="half")


def spec(config: dict[str, Any]) -> EncoderDecoder:
    hf_config = Config("marian", DEFAULTS | config)
    width = hf_config.integer("d_model")
    vocab = hf_config.integer("vocab_size")
    tied = hf_config.flag("tie_word_embeddings")
    shared, scale = hf_config.flag("share_encoder_decoder_embeddings"), bart.embedding_scale(hf_config)
    context, encoder = hf_config.integer("max_position_embeddings"), bart.encoder_layers(hf_config, "post")
    return EncoderDecoder(
        Encoder(Tokens(vocab, scale=scale), width, encoder, POSITION, context=context),
        Decoder(
            vocab if shared else hf_config.integer("decoder_vocab_size", vocab),
            width,
            bart.decoder_layers(hf_config, "post"),
            POSITION,
            NoNorm(),
            tied,
            context,
            embedding_scale=scale,
            head_bias=True,
        ),
        shared=shared and tied,  # an untied checkpoint has three embedding tables
    )


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = bart.common_config("marian", "MarianMTModel", model) | {
        "vocab_size": require_type(model.source.input, Tokens).vocab,
        "decoder_vocab_size": model.target.vocab,
        "share_encoder_decoder_embeddings": model.shared,
        "max_position_embeddings": model.target.context,
    }
    return check_roundtrip("marian", model, settings, spec)


def table(model: EncoderDecoder) -> Table:
    return bart.common_table(model, "model", *bart.stack_links("model", "encoder", "self_attn"), derived=SINUSOIDS)


def sinusoids(shape: tuple[int, ...]) -> Tensor:
    return sinusoidal_embeddings(torch.arange(shape[0]), shape[-1], POSITION)


SINUSOIDS = {f"model.{side}.embed_positions.weight": sinusoids for side in ("encoder", "decoder")}
