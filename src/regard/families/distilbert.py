"""DistilBERT (Sanh et al. 2019): BERT at half its depth, without types and without a pooler.

`sinusoidal_pos_embds` says how its table of positions began; what the file holds is what counts.
"""

from typing import Any

from regard.families.bert import ATTENTION, FEEDFORWARD, base_of
from regard.families.common.activations import OLDER, OURS
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import LABELS, Heads, architecture, ends
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, MaskedLM
from regard.models.stack import tiled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

NORM = LayerNorm(1e-12)
LAYER = {
    "attention.q_lin": f"{ATTENTION}.body.q_proj",
    "attention.k_lin": f"{ATTENTION}.body.k_proj",
    "attention.v_lin": f"{ATTENTION}.body.v_proj",
    "attention.out_lin": f"{ATTENTION}.body.o_proj",
    "sa_layer_norm": f"{ATTENTION}.norm",
    "ffn.lin1": f"{FEEDFORWARD}.body.up_proj",
    "ffn.lin2": f"{FEEDFORWARD}.body.down_proj",
    "output_layer_norm": f"{FEEDFORWARD}.norm",
}
CLASSIFIER = (Link("pre_classifier.{leaf}", "head.dense.dense.{leaf}"), *LABELS)
MASKED = (
    Link("vocab_transform.{leaf}", "head.dense.dense.{leaf}"),
    Link("vocab_layer_norm.{leaf}", "head.dense.norm.{leaf}"),
    Link("vocab_projector.{leaf}", "head.vocab.{leaf}"),
)


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("distilbert", config)
    width, context = theirs.integer("dim"), theirs.integer("max_position_embeddings")
    feedforward = FeedForward(theirs.integer("hidden_dim"), theirs.choice("activation", OURS, "gelu"))
    attention = Attention(theirs.integer("n_heads"), mask=Full(), bias=True)
    block = Block((Sublayer(attention, NORM), Sublayer(feedforward, NORM)), style="post")
    known = heads(theirs)
    return Encoder(
        Tokens(theirs.integer("vocab_size")),
        width,
        tiled((block,), theirs.integer("n_layers")),
        Learned(context),
        embedding_norm=NORM,
        head=known[theirs.architecture(known)],
        context=context,
    )


def heads(theirs: Config) -> Heads:
    words = Dense(theirs.choice("activation", OURS, "gelu"), NORM)
    return {
        "DistilBertModel": None,
        "DistilBertForMaskedLM": MaskedLM(words, tied=theirs.flag("tie_word_embeddings", True)),
        "DistilBertForSequenceClassification": Classification(theirs.labels(), dense=Dense("relu")),
        "DistilBertForTokenClassification": Classification(theirs.labels(), "none"),
    }


def config(model: Encoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    written = {
        "model_type": "distilbert",
        "vocab_size": getattr(model.input, "vocab", None),
        "dim": model.width,
        "n_layers": len(model.blocks),
        "n_heads": attention.heads,
        "hidden_dim": feedforward.hidden_dim(model.width),
        "activation": OLDER[feedforward.activation],
        "max_position_embeddings": model.position.reach,
        **ends(model.head),
    }
    theirs = Config("distilbert", written)
    written["architectures"] = [architecture(model.head, theirs, heads(theirs))]
    return check_roundtrip("distilbert", model, written, spec)


def table(model: Encoder) -> Table:
    base = base_of(model, "distilbert.")
    embeddings = f"{base}embeddings."
    return Table(
        Link(f"{embeddings}word_embeddings.weight", "input.table.weight"),
        Link(f"{embeddings}position_embeddings.weight", "position.table.weight"),
        Link(f"{embeddings}LayerNorm.{{leaf}}", "embedding_norm.{leaf}"),
        *(Link(f"{base}transformer.layer.{{i}}.{t}.{{leaf}}", f"{ours}.{{leaf}}") for t, ours in LAYER.items()),
        *(MASKED if isinstance(model.head, MaskedLM) else CLASSIFIER),
        ignored=(f"{embeddings}position_ids",),
        derived={"vocab_projector.weight": f"{embeddings}word_embeddings.weight"},
    )
