"""ModernBERT (Warner et al. 2024): windows and a full layer every few layers, RoPE with two bases, GEGLU, no biases.

The first layer has no norm before its attention, because the embeddings have one. `local_attention` counts both sides.
Configs of transformers 4 have the interval of full layers, those of version 5 a list of layer types.
"""

from typing import Any

from regard.families.bert import base_prefix
from regard.families.common.config_reader import ACTIVATION_NAMES, Config, FamilyError
from regard.families.common.encoder_heads import LABELS, Heads, check_encoder_roundtrip, read_classifier
from regard.families.common.layer_types import (
    FULL,
    SLIDING,
    layer_interval,
    layer_list,
    layer_types,
    shortest_period,
    window_size,
)
from regard.families.common.names import ATTENTION, FEEDFORWARD, GATE_UP, QKV, module_links
from regard.families.common.rope_config import read_rope_settings, rope_parameters
from regard.families.common.roundtrip import bodies
from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.window import Window
from regard.models.encoder import Encoder
from regard.models.heads import Dense, MaskedLM
from regard.models.stack import Repeat, repeat_blocks
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, NoNorm, Norm
from regard.parts.pooling import Pool
from regard.weights.ops import Split
from regard.weights.table import Link, Table

BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
POOLS: dict[str, Pool] = {"cls": "cls", "mean": "mean"}
LAYER = {
    "attn_norm": f"{ATTENTION}.norm",
    "attn.Wo": f"{ATTENTION}.body.o_proj",
    "mlp_norm": f"{FEEDFORWARD}.norm",
    "mlp.Wo": f"{FEEDFORWARD}.body.down_proj",
}


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("modernbert", config)
    classes, norm = heads(hf_config), read_norm(hf_config)
    return Encoder(
        Tokens(hf_config.integer("vocab_size")),
        hf_config.integer("hidden_size"),
        read_layers(hf_config, norm),
        embedding_norm=norm,
        norm=norm,
        head=classes[hf_config.architecture(classes)],
        context=hf_config.integer("max_position_embeddings", 8192),
    )


def read_layers(hf_config: Config, norm: LayerNorm) -> tuple[Repeat, ...]:
    default = (FULL, *[SLIDING] * (layer_interval(hf_config, "global_attn_every_n_layers", 3) - 1))
    first, *others = shortest_period(layer_list(hf_config, "layer_types", str, default))
    following = tuple(read_block(hf_config, kind, norm, norm) for kind in (*others, first))
    depth = hf_config.integer("num_hidden_layers")
    return Repeat((read_block(hf_config, first, NoNorm(), norm),)), *repeat_blocks(following, depth - 1)


def read_block(hf_config: Config, layer_type: str, attention_norm: Norm, feedforward_norm: Norm) -> Block:
    if layer_type not in BASES:
        raise FamilyError(f"modernbert: a layer has the type {layer_type!r}; it must be one of {', '.join(BASES)}")
    key, base = BASES[layer_type]
    nested = {
        **hf_config.nested("rope_parameters").nested(layer_type).values,
        **hf_config.nested("rope_scaling").values,
    }
    settings = Config(f"modernbert: {layer_type}", nested)
    window = Window(hf_config.integer("local_attention", 128) // 2, causal=False)
    attention = Attention(
        hf_config.integer("num_attention_heads"),
        position=read_rope_settings(settings, hf_config, hf_config.number(key, base)),
        mask=window if layer_type == SLIDING else Full(),
        bias=hf_config.flag("attention_bias", False),
    )
    hidden, activation = hf_config.integer("intermediate_size"), hf_config.activation("hidden_activation", "gelu")
    feedforward = Gated(hidden, activation, bias=hf_config.flag("mlp_bias", False))
    return Block((Sublayer(attention, attention_norm), Sublayer(feedforward, feedforward_norm)))


def read_norm(hf_config: Config) -> LayerNorm:
    return LayerNorm(hf_config.number("norm_eps", 1e-5), bias=hf_config.flag("norm_bias", False))


def heads(hf_config: Config) -> Heads:
    pool = hf_config.choice("classifier_pooling", POOLS, "cls")
    activation = hf_config.activation("classifier_activation", "gelu")
    dense = Dense(activation, read_norm(hf_config), hf_config.flag("classifier_bias", False))
    bias, tied = hf_config.flag("decoder_bias", True), hf_config.flag("tie_word_embeddings", True)
    return {
        "ModernBertModel": None,
        "ModernBertForMaskedLM": MaskedLM(dense, bias, tied),
        "ModernBertForSequenceClassification": read_classifier(hf_config, pool, dense),
        "ModernBertForTokenClassification": read_classifier(hf_config, "none", dense),
    }


def config(model: Encoder) -> dict[str, Any]:
    attentions, feedforwards = zip(*(bodies(block, Attention, Gated) for block in model.blocks), strict=True)
    head, types = model.head, layer_types(attentions)
    dense = getattr(head, "dense", None) or Dense("gelu", bias=False)
    settings = {
        "model_type": "modernbert",
        "vocab_size": getattr(model.input, "vocab", None),
        "hidden_size": model.width,
        "intermediate_size": feedforwards[0].hidden_dim(model.width),
        "num_hidden_layers": len(attentions),
        "num_attention_heads": attentions[0].heads,
        "hidden_activation": ACTIVATION_NAMES[feedforwards[0].activation],
        "max_position_embeddings": model.context,
        "norm_eps": getattr(model.norm, "eps", None),
        "norm_bias": getattr(model.norm, "bias", None),
        "attention_bias": attentions[0].bias,
        "mlp_bias": feedforwards[0].bias,
        "layer_types": types,
        "local_attention": 2 * (window_size(attentions) or 64),
        "rope_parameters": dict(zip(types, (rope_parameters(a.position) for a in attentions), strict=True)),
        "decoder_bias": head.bias if isinstance(head, MaskedLM) else True,
        "classifier_pooling": getattr(head, "pool", "cls").replace("none", "cls"),
        "classifier_bias": dense.bias,
        "classifier_activation": ACTIVATION_NAMES[dense.activation],
    }
    return check_encoder_roundtrip(model, settings, spec, heads)


def table(model: Encoder) -> Table:
    base = base_prefix(model, "model.")
    layer, embeddings = f"{base}layers.{{i}}", f"{base}embeddings.tok_embeddings.weight"
    return Table(
        Link(embeddings, "input.table.weight"),
        Link(f"{base}embeddings.norm.{{leaf}}", "embedding_norm.{leaf}"),
        *module_links(layer, LAYER),
        Link(f"{layer}.attn.Wqkv.{{leaf}}", QKV, Split()),
        Link(f"{layer}.mlp.Wi.{{leaf}}", GATE_UP, Split()),
        Link(f"{base}final_norm.{{leaf}}", "norm.{leaf}"),
        Link("head.{part}.{leaf}", "head.dense.{part}.{leaf}"),
        Link("decoder.{leaf}", "head.vocab.{leaf}"),
        *LABELS,
        derived={"decoder.weight": embeddings},
    )
