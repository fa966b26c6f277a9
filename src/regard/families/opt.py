"""OPT (Zhang et al. 2022): GPT-2's architecture with ReLU; the first two rows of its position table are unused.

The model of 350 million parameters differs: norms after the sublayers, no final norm, and embeddings of half the width,
with a projection to the width and one back before the head. Dropout is an option of training and is not converted.
"""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.decoder import decoder_config, read_decoder
from regard.families.common.names import ATTENTION, FEEDFORWARD, attention_links, module_links
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

LAYER = "model.decoder.layers.{i}"
NAMES = {
    "self_attn_layer_norm": f"{ATTENTION}.norm",
    "fc1": f"{FEEDFORWARD}.body.up_proj",
    "fc2": f"{FEEDFORWARD}.body.down_proj",
    "final_layer_norm": f"{FEEDFORWARD}.norm",
}
TABLE = Table(
    Link("model.decoder.embed_tokens.weight", "embedding.weight"),
    Link("model.decoder.project_in.weight", "widen.weight"),
    Link("model.decoder.embed_positions.weight", "position.table.weight"),
    *attention_links(f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
    *module_links(LAYER, NAMES),
    Link("model.decoder.final_layer_norm.{leaf}", "norm.{leaf}"),
    Link("model.decoder.project_out.weight", "narrow.weight"),
    Link("lm_head.weight", "head.weight"),
    prefix="model.",
    ignored=("lm_head.weight",),
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("opt", config)
    width, affine = hf_config.integer("hidden_size"), hf_config.flag("layer_norm_elementwise_affine", True)
    norm, bias = LayerNorm(bias=affine, weight=affine), hf_config.flag("enable_bias", True)
    pre_norm = hf_config.flag("do_layer_norm_before", True)
    attention = Attention(hf_config.integer("num_attention_heads"), bias=bias)
    feedforward = FeedForward(hf_config.integer("ffn_dim"), hf_config.activation("activation_function", "relu"), bias)
    block = Block((Sublayer(attention, norm), Sublayer(feedforward, norm)), "pre" if pre_norm else "post")
    final_norm = norm if pre_norm and not hf_config.flag("_remove_final_layer_norm", False) else NoNorm()
    model = read_decoder(hf_config, block, final_norm, tied=True)
    embedding_dim = hf_config.integer("word_embed_proj_dim", width)
    position = Learned(hf_config.integer("max_position_embeddings", 2048), offset=2)
    return replace(model, position=position, embedding_dim=None if embedding_dim == width else embedding_dim)


def config(model: Decoder) -> dict[str, Any]:
    first = model.blocks[0]
    attention, feedforward = bodies(first, Attention, FeedForward)
    pre_norm = first.style == "pre"
    settings = decoder_config("opt", "OPTForCausalLM", model) | {
        "word_embed_proj_dim": model.embedding_dim or model.width,
        "num_attention_heads": attention.heads,
        "ffn_dim": feedforward.hidden_dim(model.width),
        "activation_function": ACTIVATION_NAMES[feedforward.activation],
        "max_position_embeddings": getattr(model.position, "length", model.context),
        "do_layer_norm_before": pre_norm,
        "_remove_final_layer_norm": pre_norm and isinstance(model.norm, NoNorm),
        "layer_norm_elementwise_affine": getattr(first.sublayers[0].norm, "weight", True),
        "enable_bias": attention.bias,
    }
    return check_roundtrip("opt", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
