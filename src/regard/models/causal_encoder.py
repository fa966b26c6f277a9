"""A decoder as an encoder with causal masks, and back.

A model that scores or labels whole sequences needs no head for the next token. It has the embeddings, blocks and norm
of a decoder, and a head that pools the last token, which attends to all others: a reward model (Ouyang et al. 2022),
or the `…ForSequenceClassification` classes of `transformers`.
"""

from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.heads import Head
from regard.parts.input import Tokens
from regard.spec import require

EMBEDDINGS = {"embedding.weight": "input.table.weight"}  # names of a decoder: of the encoder that it becomes


def causal_encoder(decoder: Decoder, head: Head | None = None) -> Encoder:
    """The encoder with the hidden states of the decoder; its head and the blocks `ahead` are dropped."""
    require(
        decoder.embedding_dim is None,
        "the embeddings of this decoder are projected to its width (embedding_dim), which an encoder does with other "
        "weights; use another model",
    )
    return Encoder(
        Tokens(decoder.vocab, scale=decoder.embedding_scale),
        decoder.width,
        decoder.layers,
        decoder.position,
        decoder.embedding_norm,
        decoder.norm,
        head,
        decoder.dropout,
        context=decoder.context,
    )


def is_causal(encoder: Encoder) -> bool:
    """Whether the encoder could be one that a decoder became: no token attends to a later one."""
    bodies = [sublayer.body for block in encoder.blocks for sublayer in block.sublayers]
    return isinstance(encoder.input, Tokens) and encoder.norm is not None and all(body.causal for body in bodies)


def headless_decoder(encoder: Encoder, head_bias: bool = False) -> Decoder:
    """The decoder of a causal encoder, for its sizes and names; the fields of its head have no meaning."""
    assert isinstance(encoder.input, Tokens) and encoder.norm is not None, "checked by is_causal"
    return Decoder(
        encoder.input.vocab,
        encoder.width,
        encoder.layers,
        encoder.position,
        encoder.norm,
        context=encoder.context,
        embedding_scale=encoder.input.scale,
        embedding_norm=encoder.embedding_norm,
        embedding_dim=encoder.embedding_dim,
        head_bias=head_bias,
        dropout=encoder.dropout,
    )
