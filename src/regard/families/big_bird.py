"""BigBird (Zaheer et al. 2020): BERT with block-sparse attention, to neighbouring blocks and both ends of the sequence.

`original_full` is BERT's attention. `block_sparse` is read as transformers evaluates it; the random blocks that are
drawn in training, per head and length, are not converted (parts/big_bird_attention.py).
"""

from dataclasses import replace
from typing import Any

from regard.families import bert
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import (
    DENSE_AND_LABELS,
    Heads,
    bert_head_links,
    check_encoder_roundtrip,
    read_classifier,
    read_pooler,
)
from regard.families.common.roundtrip import bodies
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, PreTraining
from regard.parts.attention import Attention
from regard.parts.big_bird_attention import BigBirdAttention
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.weights.table import Table

ATTENTION_TYPES = {"original_full": Attention, "block_sparse": BigBirdAttention}


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("big_bird", {"hidden_act": "gelu_new"} | config)
    layers = bert.uniform_layers(hf_config, read_attention(hf_config))
    model = bert.read_encoder(hf_config, layers, bert.read_positions(hf_config), heads(hf_config))
    scale = model.width**0.5 if hf_config.flag("rescale_embeddings", False) else 1.0
    return replace(model, input=Tokens(hf_config.integer("vocab_size"), hf_config.integer("type_vocab_size", 2), scale))


def read_attention(hf_config: Config) -> Attention:
    heads, bias = hf_config.integer("num_attention_heads"), hf_config.flag("use_bias", True)
    if hf_config.choice("attention_type", ATTENTION_TYPES, "block_sparse") is Attention:
        return Attention(heads, mask=Full(), bias=bias, out_bias=True)
    block, links = hf_config.integer("block_size", 64), hf_config.integer("num_random_blocks", 3)
    return BigBirdAttention(heads, bias=bias, out_bias=True, block=block, links=links)


def config(model: Encoder) -> dict[str, Any]:
    attention, _ = bodies(model.blocks[0], Attention, FeedForward)
    sparse = isinstance(attention, BigBirdAttention)
    settings = bert.common_config("big_bird", model) | {
        "attention_type": "block_sparse" if sparse else "original_full",
        "block_size": attention.block if sparse else 64,
        "num_random_blocks": attention.links if sparse else 3,
        "use_bias": attention.bias,
        "rescale_embeddings": getattr(model.input, "scale", 1.0) != 1.0,
    }
    return check_encoder_roundtrip(model, settings, spec, heads)


def table(model: Encoder) -> Table:
    base = bert.base_prefix(model, "bert.")
    pooler = f"{base}pooler.{{leaf}}"
    links = *bert.encoder_links(base), *bert_head_links(model.head, pooler, DENSE_AND_LABELS)
    return Table(*links, **bert.ignored_and_derived(base, pooler))


def heads(hf_config: Config) -> Heads:
    dense, masked_lm = Dense(hf_config.activation("hidden_act")), bert.read_masked_lm(hf_config)
    return {
        "BigBirdModel": read_pooler(hf_config),
        "BigBirdForMaskedLM": masked_lm,
        "BigBirdForPreTraining": PreTraining(masked_lm, Classification(2, dense=Dense("tanh"))),
        "BigBirdForSequenceClassification": read_classifier(hf_config, dense=dense),
        "BigBirdForTokenClassification": read_classifier(hf_config, "none"),
    }
