"""Pegasus (Zhang et al. 2019): BART with sinusoidal positions, norms before the sublayers and after each stack.

Its files contain the sinusoids: they are compared with ours and not loaded, and an export does not write them.
transformers uses those of the file. If they are stored in half precision, its outputs differ from ours by about their
rounding.
"""

from typing import Any

from regard.families import bart
from regard.families.common.config_reader import Config
from regard.families.common.names import module_links
from regard.families.common.roundtrip import check_roundtrip
from regard.families.marian import POSITION, SINUSOIDS
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.weights.table import Table

FINAL_NORMS = module_links("model", {f"{stack}.layer_norm": f"{ours}.norm" for stack, ours in bart.STACKS.items()})


def spec(config: dict[str, Any]) -> EncoderDecoder:
    hf_config = Config("pegasus", bart.DEFAULTS | config)
    width = hf_config.integer("d_model")
    vocab = hf_config.integer("vocab_size")
    tied = hf_config.flag("tie_word_embeddings")
    scale, norm, context = bart.embedding_scale(hf_config), LayerNorm(), hf_config.integer("max_position_embeddings")
    encoder, decoder = bart.encoder_layers(hf_config, "pre"), bart.decoder_layers(hf_config, "pre")
    return EncoderDecoder(
        Encoder(Tokens(vocab, scale=scale), width, encoder, POSITION, norm=norm, context=context),
        Decoder(vocab, width, decoder, POSITION, norm, tied, context, embedding_scale=scale, head_bias=True),
        shared=tied,  # an untied checkpoint has three embedding tables
    )


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = bart.common_config("pegasus", "PegasusForConditionalGeneration", model)
    return check_roundtrip("pegasus", model, settings | {"max_position_embeddings": model.target.context}, spec)


def table(model: EncoderDecoder) -> Table:
    encoder = bart.stack_links("model", "encoder", "self_attn")
    return bart.common_table(model, "model", *encoder, *FINAL_NORMS, derived=SINUSOIDS)
