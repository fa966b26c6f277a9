"""Marian (Junczys-Dowmunt et al. 2018), the OPUS translators: the 2017 encoder-decoder, sines before cosines.

The two languages share a table of words, or have one each of different sizes. Its logits have a bias. Published files
hold its sinusoids too: they are held against ours and not taken.
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
from regard.parts.position.sinusoidal import Sinusoidal, waves
from regard.weights.table import Table

DEFAULTS = bart.DEFAULTS | {"vocab_size": 58101, "share_encoder_decoder_embeddings": True}
POSITION = Sinusoidal(layout="half")


def spec(config: dict[str, Any]) -> EncoderDecoder:
    theirs = Config("marian", DEFAULTS | config)
    width, vocab, tied = theirs.integer("d_model"), theirs.integer("vocab_size"), theirs.flag("tie_word_embeddings")
    shared, scale = theirs.flag("share_encoder_decoder_embeddings"), bart.embedding_scale(theirs)
    context, (read, write) = theirs.integer("max_position_embeddings"), bart.layers(theirs, "post")
    return EncoderDecoder(
        Encoder(Tokens(vocab, scale=scale), width, read, POSITION, context=context),
        Decoder(
            vocab if shared else theirs.integer("decoder_vocab_size", vocab),
            width,
            write,
            POSITION,
            NoNorm(),
            tied,
            context,
            embedding_scale=scale,
            head_bias=True,
        ),
        shared=shared and tied,  # untied, theirs has three tables of words
    )


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = bart.settings(model)
    written = settings | {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "vocab_size": require_type(model.source.input, Tokens).vocab,
        "decoder_vocab_size": model.target.vocab,
        "share_encoder_decoder_embeddings": model.shared,
        "max_position_embeddings": model.target.context,
    }
    return check_roundtrip("marian", model, written, spec)


def table(model: EncoderDecoder) -> Table:
    return bart.tables(model, "model", derived=SINUSOIDS)


def sinusoids(shape: tuple[int, ...]) -> Tensor:
    return waves(torch.arange(shape[0]), shape[-1], POSITION)


SINUSOIDS = {f"model.{side}.embed_positions.weight": sinusoids for side in ("encoder", "decoder")}
