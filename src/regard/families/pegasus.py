"""Pegasus (Zhang et al. 2019): BART with sinusoids, and norms before the sublayers and behind each stack.

Its files hold the sinusoids: they are held against ours and not taken, and an export leaves them out.
"""

from typing import Any

from regard.families import bart
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import check_roundtrip
from regard.families.marian import POSITION, SINUSOIDS
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.weights.table import Link, Table

NORMS = (
    Link("model.encoder.layer_norm.{leaf}", "source.norm.{leaf}"),
    Link("model.decoder.layer_norm.{leaf}", "target.norm.{leaf}"),
)


def spec(config: dict[str, Any]) -> EncoderDecoder:
    theirs = Config("pegasus", bart.DEFAULTS | config)
    width, vocab, tied = theirs.integer("d_model"), theirs.integer("vocab_size"), theirs.flag("tie_word_embeddings")
    scale, norm, (read, write) = bart.embedding_scale(theirs), LayerNorm(), bart.layers(theirs, "pre")
    context = theirs.integer("max_position_embeddings")
    return EncoderDecoder(
        Encoder(Tokens(vocab, scale=scale), width, read, POSITION, norm=norm, context=context),
        Decoder(vocab, width, write, POSITION, norm, tied, context, embedding_scale=scale, head_bias=True),
        shared=tied,  # untied, theirs has three tables of words
    )


def config(model: EncoderDecoder) -> dict[str, Any]:
    names = {"model_type": "pegasus", "architectures": ["PegasusForConditionalGeneration"]}
    written = names | bart.settings(model) | {"max_position_embeddings": model.target.context}
    return check_roundtrip("pegasus", model, written, spec)


def table(model: EncoderDecoder) -> Table:
    return bart.tables(model, "model", *NORMS, derived=SINUSOIDS)
