"""RoBERTa (Liu et al. 2019): BERT whose positions begin behind the id of padding, with heads of its own.

Token t of a text has row t + 1 + pad_token_id of the table: padding itself has a row, and what stands before is unused.
"""

from typing import Any

from regard.families import bert
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.encoder_heads import DENSE_AND_LABELS, LABELS, Heads, architecture, copies
from regard.families.common.roundtrip import check_roundtrip
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, MaskedLM
from regard.models.stack import tiled
from regard.parts.attention import Attention
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("roberta", config)
    attention = Attention(theirs.integer("num_attention_heads"), mask=Full(), bias=True)
    layers = tiled((bert.block(theirs, attention),), theirs.integer("num_hidden_layers"))
    return bert.encoder(theirs, layers, position(theirs), heads(theirs, "Roberta"))


def config(model: Encoder) -> dict[str, Any]:
    written = {"model_type": "roberta", **settings(model)}
    theirs = Config("roberta", written)
    written["architectures"] = [architecture(model.head, theirs, heads(theirs, "Roberta"))]
    return check_roundtrip("roberta", model, written, spec)


def table(model: Encoder) -> Table:
    base = bert.base_of(model, "roberta.")
    return Table(*bert.links(base), *head_links(model.head), ignored=ignored(base), derived=copies(base, "lm_head"))


def position(theirs: Config) -> Learned:
    unused = theirs.integer("pad_token_id", 1) + 1
    if unused < 1:
        raise FamilyError(
            f"{theirs.model_type}: pad_token_id={unused - 1}; positions begin behind it, so it cannot be below 0"
        )
    return Learned(theirs.integer("max_position_embeddings") - unused, unused)


def heads(theirs: Config, name: str) -> Heads:
    return {
        f"{name}Model": None,
        f"{name}ForMaskedLM": bert.words(theirs, "gelu"),
        f"{name}ForSequenceClassification": Classification(theirs.labels(), dense=Dense("tanh")),
        f"{name}ForTokenClassification": Classification(theirs.labels(), "none"),
    }


def settings(model: Encoder) -> dict[str, Any]:
    written, unused = bert.settings(model), getattr(model.position, "offset", 0)
    rows = written["max_position_embeddings"] or 0
    return written | {"max_position_embeddings": rows + unused, "pad_token_id": unused - 1}


def head_links(head: Head | None) -> tuple[Link, ...]:
    if isinstance(head, MaskedLM):
        return (
            Link("lm_head.dense.{leaf}", "head.dense.dense.{leaf}"),
            Link("lm_head.layer_norm.{leaf}", "head.dense.norm.{leaf}"),
            Link("lm_head.bias" if head.tied else "lm_head.decoder.bias", "head.vocab.bias"),
            Link("lm_head.decoder.weight", "head.vocab.weight"),
        )
    return DENSE_AND_LABELS if isinstance(head, Classification) and head.dense else LABELS


def ignored(base: str) -> tuple[str, ...]:
    return f"{base}pooler.dense.{{leaf}}", f"{base}embeddings.position_ids", "lm_head.bias"
