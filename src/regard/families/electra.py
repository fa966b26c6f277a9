"""ELECTRA (Clark et al. 2020): BERT with narrow embeddings, a small generator and a discriminator.

The generator guesses masked words; the discriminator (`ForPreTraining`) says of every token whether it was replaced,
which is a label for every token. Either is a model of its own.
"""

from typing import Any

from regard.families import bert
from regard.families.common.activations import OURS
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import DENSE_AND_LABELS, LABELS, Heads, architecture
from regard.families.common.roundtrip import check_roundtrip
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, MaskedLM
from regard.models.stack import tiled
from regard.parts.attention import Attention
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

GENERATOR = (
    Link("generator_predictions.dense.{leaf}", "head.dense.dense.{leaf}"),
    Link("generator_predictions.LayerNorm.{leaf}", "head.dense.norm.{leaf}"),
    Link("generator_lm_head.{leaf}", "head.vocab.{leaf}"),
)
DISCRIMINATOR = (
    Link("discriminator_predictions.dense.{leaf}", "head.dense.dense.{leaf}"),
    Link("discriminator_predictions.dense_prediction.{leaf}", "head.labels.{leaf}"),
)


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("electra", {"embedding_size": 128} | config)
    attention = Attention(theirs.integer("num_attention_heads"), mask=Full(), bias=True)
    layers = tiled((bert.block(theirs, attention),), theirs.integer("num_hidden_layers"))
    return bert.encoder(theirs, layers, Learned(theirs.integer("max_position_embeddings")), heads(theirs))


def config(model: Encoder) -> dict[str, Any]:
    written = {"model_type": "electra", "embedding_size": model.table_dim, **bert.settings(model)}
    theirs = Config("electra", written)
    written["architectures"] = [architecture(model.head, theirs, heads(theirs))]
    return check_roundtrip("electra", model, written, spec)


def table(model: Encoder) -> Table:
    base = bert.base_of(model, "electra.")
    tables = f"{base}embeddings.word_embeddings.weight"
    ignored = (f"{base}embeddings.position_ids",)
    return Table(
        *bert.links(base), *head_links(model.head), ignored=ignored, derived={"generator_lm_head.weight": tables}
    )


def heads(theirs: Config) -> Heads:
    replaced = Dense(theirs.choice("hidden_act", OURS, "gelu"))
    return {
        "ElectraModel": None,
        "ElectraForMaskedLM": bert.words(theirs, "gelu"),
        "ElectraForPreTraining": Classification(1, "none", replaced),
        "ElectraForSequenceClassification": Classification(theirs.labels(), dense=Dense("gelu")),
        "ElectraForTokenClassification": Classification(theirs.labels(), "none"),
    }


def head_links(head: Head | None) -> tuple[Link, ...]:
    match head:
        case MaskedLM():
            return GENERATOR
        case Classification(pool="none", dense=Dense()):
            return DISCRIMINATOR
        case Classification(dense=Dense()):
            return DENSE_AND_LABELS
    return LABELS
