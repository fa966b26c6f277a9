"""RoFormer (Su et al. 2021): BERT with RoPE in interleaved pairs instead of a position table.

Its files contain the sines and cosines of all positions: they are compared with ours and not loaded. transformers uses
those of the file. If they are stored in half precision, its outputs differ from ours by about their rounding.
"""

from typing import Any

import torch
from torch import Tensor

from regard.families import bert
from regard.families.common import encoder_heads
from regard.families.common.config_reader import Config
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Dense
from regard.parts.attention import Attention
from regard.parts.position.base import NoPosition
from regard.parts.position.rope import Rope
from regard.parts.position.sinusoidal import Sinusoidal, sinusoidal_embeddings
from regard.weights.table import Table, WeightsError


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("roformer", config)
    hf_config.accept_only("rotary_value", False)
    rope = Rope(layout="interleaved")
    attention = Attention(hf_config.integer("num_attention_heads"), position=rope, mask=Full(), bias=True)
    return bert.read_encoder(hf_config, bert.uniform_layers(hf_config, attention), NoPosition(), heads(hf_config))


def config(model: Encoder) -> dict[str, Any]:
    settings = bert.common_config("roformer", model) | {"embedding_size": model.table_dim}
    return encoder_heads.check_encoder_roundtrip(model, settings, spec, heads)


def table(model: Encoder) -> Table:
    base = bert.base_prefix(model, "roformer.")
    links = *bert.encoder_links(base), *encoder_heads.bert_head_links(model.head, "", encoder_heads.DENSE_AND_LABELS)
    sinusoids = {f"{base}encoder.embed_positions.weight": sines_and_cosines}
    derived = {**encoder_heads.tied_copies(base, "cls.predictions"), **sinusoids}
    return Table(*links, ignored=("cls.predictions.bias",), derived=derived)


def heads(hf_config: Config) -> encoder_heads.Heads:
    dense = Dense(hf_config.activation("hidden_act", "gelu"))
    return {
        "RoFormerModel": None,
        "RoFormerForMaskedLM": bert.read_masked_lm(hf_config),
        "RoFormerForSequenceClassification": encoder_heads.read_classifier(hf_config, dense=dense),
        "RoFormerForTokenClassification": encoder_heads.read_classifier(hf_config, "none"),
    }


def sines_and_cosines(shape: tuple[int, ...]) -> Tensor:
    """(positions, head_dim): the sines of a position's angles, then the cosines."""
    if len(shape) != 2:
        raise WeightsError(f"embed_positions.weight must be (positions, head_dim), found {shape}")
    return sinusoidal_embeddings(torch.arange(shape[0]), shape[1], Sinusoidal(layout="half"))
