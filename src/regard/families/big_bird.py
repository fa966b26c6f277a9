"""BigBird (Zaheer et al. 2020): BERT over blocks that see their neighbours and both ends of the text.

`original_full` is BERT's attention. `block_sparse` is read as it is evaluated; the blocks that are drawn at random in
training, anew for every head and length, are not (parts/big_bird_attention.py).
"""

from dataclasses import replace
from typing import Any

from regard.families import bert
from regard.families.common.activations import OURS
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import (
    DENSE_AND_LABELS,
    LABELS,
    Heads,
    architecture,
    copies,
    predictions,
    pretraining,
)
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, MaskedLM, PreTraining
from regard.models.stack import tiled
from regard.parts.attention import Attention
from regard.parts.big_bird_attention import BigBirdAttention
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

KINDS = {"original_full": Attention, "block_sparse": BigBirdAttention}


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("big_bird", {"hidden_act": "gelu_new"} | config)
    count, bias = theirs.integer("num_attention_heads"), theirs.flag("use_bias", True)
    attention = Attention(count, mask=Full(), bias=bias, out_bias=True)
    if theirs.choice("attention_type", KINDS, "block_sparse") is BigBirdAttention:
        block, links = theirs.integer("block_size", 64), theirs.integer("num_random_blocks", 3)
        attention = BigBirdAttention(count, bias=bias, out_bias=True, block=block, links=links)
    layers = tiled((bert.block(theirs, attention),), theirs.integer("num_hidden_layers"))
    model = bert.encoder(theirs, layers, Learned(theirs.integer("max_position_embeddings")), heads(theirs))
    scale = model.width**0.5 if theirs.flag("rescale_embeddings", False) else 1.0
    return replace(model, input=Tokens(theirs.integer("vocab_size"), theirs.integer("type_vocab_size", 2), scale))


def config(model: Encoder) -> dict[str, Any]:
    attention, _ = bodies(model.blocks[0], Attention, FeedForward)
    sparse = isinstance(attention, BigBirdAttention)
    written = {
        "model_type": "big_bird",
        **bert.settings(model),
        "attention_type": "block_sparse" if sparse else "original_full",
        "block_size": attention.block if sparse else 64,
        "num_random_blocks": attention.links if sparse else 3,
        "use_bias": attention.bias,
        "rescale_embeddings": getattr(model.input, "scale", 1.0) != 1.0,
    }
    theirs = Config("big_bird", written)
    written["architectures"] = [architecture(model.head, theirs, heads(theirs))]
    return check_roundtrip("big_bird", model, written, spec)


def table(model: Encoder) -> Table:
    base = bert.base_of(model, "bert.")
    pooler = f"{base}pooler.{{leaf}}"
    ignored = (pooler, f"{base}embeddings.position_ids", "cls.seq_relationship.{leaf}", "cls.predictions.bias")
    known = copies(base, "cls.predictions")
    return Table(*bert.links(base), *head_links(model.head, pooler), ignored=ignored, derived=known)


def heads(theirs: Config) -> Heads:
    dense, words = Dense(theirs.choice("hidden_act", OURS)), bert.words(theirs)
    return {
        "BigBirdModel": None,
        "BigBirdForMaskedLM": words,
        "BigBirdForPreTraining": PreTraining(words, Classification(2, dense=Dense("tanh"))),
        "BigBirdForSequenceClassification": Classification(theirs.labels(), dense=dense),
        "BigBirdForTokenClassification": Classification(theirs.labels(), "none"),
    }


def head_links(head: Head | None, pooler: str) -> tuple[Link, ...]:
    match head:
        case MaskedLM():
            return predictions(head)
        case PreTraining():
            return pretraining(head, pooler)
        case Classification(dense=Dense()):
            return DENSE_AND_LABELS
    return LABELS
