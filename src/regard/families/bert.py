"""BERT (Devlin et al. 2018): learned positions, types, LayerNorm behind every sublayer, GELU, biases everywhere.

Its relatives say what differs and take the rest from here. The plain `BertModel` is an encoder without a head: the
pooler in its file is read by nobody (sentence encoders take the mean) and is left out, as in every class that has no
use for one. Dropout is a choice of the training run. The first files spell a norm's weight and bias gamma and beta.
"""

from typing import Any

from regard.families.common.activations import OLDER, OURS
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import LABELS, Heads, architecture, copies, ends, predictions, pretraining
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, MaskedLM, PreTraining
from regard.models.stack import Repeat, tiled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Activation, FeedForward
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.parts.position.base import Position
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

ATTENTION, FEEDFORWARD = "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"
LAYER = {
    "attention.self.query": f"{ATTENTION}.body.q_proj",
    "attention.self.key": f"{ATTENTION}.body.k_proj",
    "attention.self.value": f"{ATTENTION}.body.v_proj",
    "attention.output.dense": f"{ATTENTION}.body.o_proj",
    "attention.output.LayerNorm": f"{ATTENTION}.norm",
    "intermediate.dense": f"{FEEDFORWARD}.body.up_proj",
    "output.dense": f"{FEEDFORWARD}.body.down_proj",
    "output.LayerNorm": f"{FEEDFORWARD}.norm",
}
OLD = {"gamma": "weight", "beta": "bias"}


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("bert", config)
    attention = Attention(theirs.integer("num_attention_heads"), mask=Full(), bias=True)
    layers = tiled((block(theirs, attention),), theirs.integer("num_hidden_layers"))
    return encoder(theirs, layers, Learned(theirs.integer("max_position_embeddings")), heads(theirs))


def config(model: Encoder) -> dict[str, Any]:
    written = {"model_type": "bert", **settings(model)}
    theirs = Config("bert", written)
    return check_roundtrip(
        "bert", model, written | {"architectures": [architecture(model.head, theirs, heads(theirs))]}, spec
    )


def table(model: Encoder) -> Table:
    base = base_of(model, "bert.")
    pooler = f"{base}pooler.dense.{{leaf}}"
    ignored = (pooler, f"{base}embeddings.position_ids", "cls.seq_relationship.{leaf}", "cls.predictions.bias")
    known = copies(base, "cls.predictions")
    return Table(*links(base), *head_links(model.head, pooler), ignored=ignored, derived=known, leaf_aliases=OLD)


def heads(theirs: Config) -> Heads:
    pooler = Dense("tanh")
    return {
        "BertModel": None,
        "BertForMaskedLM": words(theirs),
        "BertForPreTraining": PreTraining(words(theirs), Classification(2, dense=pooler)),
        "BertForSequenceClassification": Classification(theirs.labels(), dense=pooler),
        "BertForTokenClassification": Classification(theirs.labels(), "none"),
    }


def head_links(head: Head | None, pooler: str) -> tuple[Link, ...]:
    match head:
        case MaskedLM():
            return predictions(head)
        case PreTraining():
            return pretraining(head, pooler)
    return *LABELS, Link(pooler, "head.dense.dense.{leaf}")


def words(theirs: Config, activation: Activation | None = None) -> MaskedLM:
    activation = activation or theirs.choice("hidden_act", OURS, "gelu")
    return MaskedLM(Dense(activation, norm(theirs)), tied=theirs.flag("tie_word_embeddings", True))


def norm(theirs: Config) -> LayerNorm:
    return LayerNorm(theirs.number("layer_norm_eps", 1e-12))


def block(theirs: Config, attention: Attention) -> Block:
    feedforward = FeedForward(theirs.integer("intermediate_size"), theirs.choice("hidden_act", OURS, "gelu"))
    return Block((Sublayer(attention, norm(theirs)), Sublayer(feedforward, norm(theirs))), style="post")


def encoder(theirs: Config, layers: tuple[Repeat, ...], position: Position, heads: Heads) -> Encoder:
    theirs.only("is_decoder", False)
    theirs.only("position_embedding_type", "absolute")
    width = theirs.integer("hidden_size")
    narrow = theirs.integer("embedding_size", width)
    return Encoder(
        Tokens(theirs.integer("vocab_size"), types=theirs.integer("type_vocab_size", 2)),
        width,
        layers,
        position,
        embedding_norm=norm(theirs),
        head=heads[theirs.architecture(heads)],
        embedding_dim=None if narrow == width else narrow,
        context=position.reach or theirs.integer("max_position_embeddings"),
    )


def settings(model: Encoder) -> dict[str, Any]:
    """What BERT and its relatives all say."""
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    return {
        "vocab_size": getattr(model.input, "vocab", None),
        "type_vocab_size": getattr(model.input, "types", None),
        "hidden_size": model.width,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "intermediate_size": feedforward.hidden_dim(model.width),
        "hidden_act": OLDER[feedforward.activation],
        "max_position_embeddings": model.position.reach or model.context,
        "layer_norm_eps": getattr(model.embedding_norm, "eps", None),
        **ends(model.head),
    }


def base_of(model: Encoder, name: str) -> str:
    """What stands before every name of the encoder: nothing where it is saved alone."""
    return "" if model.head is None else name


def links(base: str) -> tuple[Link, ...]:
    return (
        Link(f"{base}embeddings.word_embeddings.weight", "input.table.weight"),
        Link(f"{base}embeddings.token_type_embeddings.weight", "input.types.weight"),
        Link(f"{base}embeddings.position_embeddings.weight", "position.table.weight"),
        Link(f"{base}embeddings.LayerNorm.{{leaf}}", "embedding_norm.{leaf}"),
        Link(f"{base}embeddings_project.{{leaf}}", "widen.{leaf}"),
        *(Link(f"{base}encoder.layer.{{i}}.{theirs}.{{leaf}}", f"{ours}.{{leaf}}") for theirs, ours in LAYER.items()),
    )
