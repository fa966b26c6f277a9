"""RoBERTa (Liu et al. 2019): BERT with positions that start after the padding id, and with other heads.

Token t of a sequence uses row t + 1 + pad_token_id of the position table; padding has row pad_token_id, and the rows
below it are unused.
"""

from functools import partial
from typing import Any

from regard.families import bert
from regard.families.common import encoder_heads
from regard.families.common.config_reader import Config
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, MaskedLM, Pooler
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("roberta", config)
    return bert.read_encoder(
        hf_config, bert.uniform_layers(hf_config), read_positions(hf_config), heads(hf_config, "Roberta")
    )


def config(model: Encoder) -> dict[str, Any]:
    settings, roberta_heads = common_config("roberta", model), partial(heads, name="Roberta")
    return encoder_heads.check_encoder_roundtrip(model, settings, spec, roberta_heads)


def table(model: Encoder) -> Table:
    base = bert.base_prefix(model, "roberta.")
    links = *bert.encoder_links(base), *head_links(model.head, base)
    return Table(*links, ignored=ignored(base), derived=encoder_heads.tied_copies(base, "lm_head"))


def read_positions(hf_config: Config) -> Learned:
    padding = hf_config.integer("pad_token_id", 1)
    if padding < 0:
        raise hf_config.error("pad_token_id", padding, "must be at least 0, because positions start after it")
    return Learned(hf_config.integer("max_position_embeddings") - (padding + 1), offset=padding + 1)


def heads(hf_config: Config, name: str) -> encoder_heads.Heads:
    """`name` is the prefix of the class names."""
    return {
        f"{name}Model": encoder_heads.read_pooler(hf_config),
        f"{name}ForMaskedLM": bert.read_masked_lm(hf_config, "gelu"),
        f"{name}ForSequenceClassification": encoder_heads.read_classifier(hf_config, dense=Dense("tanh")),
        f"{name}ForTokenClassification": encoder_heads.read_classifier(hf_config, "none"),
    }


def common_config(model_type: str, model: Encoder) -> dict[str, Any]:
    """The keys that RoBERTa and Longformer have."""
    settings, offset = bert.common_config(model_type, model), getattr(model.position, "offset", 0)
    positions = settings["max_position_embeddings"] or 0
    return settings | {"max_position_embeddings": positions + offset, "pad_token_id": offset - 1}


def head_links(head: Head | None, base: str) -> tuple[Link, ...]:
    if isinstance(head, Pooler):
        return (Link(f"{base}pooler.dense.{{leaf}}", "head.dense.dense.{leaf}"),)
    if isinstance(head, MaskedLM):
        return (
            Link("lm_head.dense.{leaf}", "head.dense.dense.{leaf}"),
            Link("lm_head.layer_norm.{leaf}", "head.dense.norm.{leaf}"),
            Link("lm_head.bias" if head.tied else "lm_head.decoder.bias", "head.vocab.bias"),
            Link("lm_head.decoder.weight", "head.vocab.weight"),
        )
    return encoder_heads.DENSE_AND_LABELS if isinstance(head, Classification) and head.dense else encoder_heads.LABELS


def ignored(base: str) -> tuple[str, ...]:
    return f"{base}pooler.dense.{{leaf}}", f"{base}embeddings.position_ids", "lm_head.bias"
