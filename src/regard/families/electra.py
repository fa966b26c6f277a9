"""ELECTRA (Clark et al. 2020): BERT with narrow embeddings, as a small generator and as a discriminator.

The generator is a masked language model. The discriminator (`ForPreTraining`) predicts for every token whether it was
replaced: one label per token. The two are separate models.
"""

from typing import Any

from regard.families import bert
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import (
    DENSE_AND_LABELS,
    LABELS,
    Heads,
    check_encoder_roundtrip,
    read_classifier,
)
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, MaskedLM
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
    hf_config = Config("electra", {"embedding_size": 128} | config)
    return bert.read_encoder(
        hf_config, bert.uniform_layers(hf_config), bert.read_positions(hf_config), heads(hf_config)
    )


def config(model: Encoder) -> dict[str, Any]:
    settings = bert.common_config("electra", model) | {"embedding_size": model.table_dim}
    return check_encoder_roundtrip(model, settings, spec, heads)


def table(model: Encoder) -> Table:
    base = bert.base_prefix(model, "electra.")
    return Table(
        *bert.encoder_links(base),
        *head_links(model.head),
        ignored=(f"{base}embeddings.position_ids",),
        derived={"generator_lm_head.weight": f"{base}embeddings.word_embeddings.weight"},
    )


def heads(hf_config: Config) -> Heads:
    dense = Dense(hf_config.activation("hidden_act", "gelu"))
    return {
        "ElectraModel": None,
        "ElectraForMaskedLM": bert.read_masked_lm(hf_config, "gelu"),
        "ElectraForPreTraining": Classification(1, "none", dense),
        "ElectraForSequenceClassification": read_classifier(hf_config, dense=Dense("gelu")),
        "ElectraForTokenClassification": read_classifier(hf_config, "none"),
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
