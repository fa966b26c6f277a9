"""RoFormer (Su et al. 2021): BERT without a table of positions; queries and keys turn in pairs of neighbours instead.

Its files hold the sines and cosines of all positions, which are computed here.
"""

from typing import Any

import torch
from torch import Tensor

from regard.families import bert
from regard.families.common.activations import OURS
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import DENSE_AND_LABELS, LABELS, Heads, architecture, copies, predictions
from regard.families.common.roundtrip import check_roundtrip
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, MaskedLM
from regard.models.stack import tiled
from regard.parts.attention import Attention
from regard.parts.position.base import NoPosition
from regard.parts.position.rope import Rope
from regard.parts.position.sinusoidal import Sinusoidal, waves
from regard.weights.table import Link, Table, WeightsError


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("roformer", config)
    theirs.only("rotary_value", False)
    rope = Rope(layout="interleaved")
    attention = Attention(theirs.integer("num_attention_heads"), position=rope, mask=Full(), bias=True)
    layers = tiled((bert.block(theirs, attention),), theirs.integer("num_hidden_layers"))
    return bert.encoder(theirs, layers, NoPosition(), heads(theirs))


def config(model: Encoder) -> dict[str, Any]:
    written = {"model_type": "roformer", "embedding_size": model.table_dim, **bert.settings(model)}
    theirs = Config("roformer", written)
    written["architectures"] = [architecture(model.head, theirs, heads(theirs))]
    return check_roundtrip("roformer", model, written, spec)


def table(model: Encoder) -> Table:
    base = bert.base_of(model, "roformer.")
    known = {**copies(base, "cls.predictions"), f"{base}encoder.embed_positions.weight": turns}
    return Table(*bert.links(base), *head_links(model.head), ignored=("cls.predictions.bias",), derived=known)


def heads(theirs: Config) -> Heads:
    dense = Dense(theirs.choice("hidden_act", OURS, "gelu"))
    return {
        "RoFormerModel": None,
        "RoFormerForMaskedLM": bert.words(theirs),
        "RoFormerForSequenceClassification": Classification(theirs.labels(), dense=dense),
        "RoFormerForTokenClassification": Classification(theirs.labels(), "none"),
    }


def head_links(head: Head | None) -> tuple[Link, ...]:
    if isinstance(head, MaskedLM):
        return predictions(head)
    return DENSE_AND_LABELS if isinstance(head, Classification) and head.dense else LABELS


def turns(shape: tuple[int, ...]) -> Tensor:
    """Of every position the sines of its angles, then the cosines."""
    if len(shape) != 2:
        raise WeightsError(f"embed_positions.weight should be (positions, head_dim), found {shape}")
    return waves(torch.arange(shape[0]), shape[1], Sinusoidal(layout="half"))
