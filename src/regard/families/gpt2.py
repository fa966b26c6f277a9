"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before every sublayer, GELU, biases everywhere.

Its linear layers are stored as (in, out); queries, keys and values are fused. Dropout is an option of training and is
not converted. Published files often lack the prefix `transformer.` and contain attention masks.
"""

from typing import Any

from regard.families.common.config_reader import LEGACY_ACTIVATION_NAMES, Config
from regard.families.common.names import ATTENTION, FEEDFORWARD, QKV
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Activation, FeedForward
from regard.parts.norm import LayerNorm
from regard.parts.position.learned import Learned
from regard.weights.ops import Op, Split, Transpose
from regard.weights.table import Link, Table

LAYER = "transformer.h.{i}"
IGNORED = ("lm_head.weight", f"{LAYER}.attn.bias", f"{LAYER}.attn.masked_bias")


def common_table(*ops: Op, groups: int = 1) -> Table:
    """`ops` convert the matrices of linear layers; queries, keys and values are fused per group of heads."""
    return Table(
        Link("transformer.wte.weight", "embedding.weight"),
        Link("transformer.wpe.weight", "position.table.weight"),
        Link(f"{LAYER}.ln_1.{{leaf}}", f"{ATTENTION}.norm.{{leaf}}"),
        Link(f"{LAYER}.attn.c_attn.{{leaf}}", QKV, *ops, Split(groups=groups)),
        Link(f"{LAYER}.attn.c_proj.{{leaf}}", f"{ATTENTION}.body.o_proj.{{leaf}}", *ops),
        Link(f"{LAYER}.ln_2.{{leaf}}", f"{FEEDFORWARD}.norm.{{leaf}}"),
        Link(f"{LAYER}.mlp.c_fc.{{leaf}}", f"{FEEDFORWARD}.body.up_proj.{{leaf}}", *ops),
        Link(f"{LAYER}.mlp.c_proj.{{leaf}}", f"{FEEDFORWARD}.body.down_proj.{{leaf}}", *ops),
        Link("transformer.ln_f.{leaf}", "norm.{leaf}"),
        Link("lm_head.weight", "head.weight"),
        prefix="transformer.",
        ignored=IGNORED,
    )


TABLE = common_table(Transpose())


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("gpt2", config)
    hf_config.accept_only("scale_attn_by_inverse_layer_idx", False)
    return read_gpt2(hf_config, None, "gelu_new")


def read_gpt2(hf_config: Config, kv_heads: int | None, activation: str) -> Decoder:
    """GPT-2 and its variations; `activation` is the default of the family's class."""
    hf_config.accept_only("add_cross_attention", False)
    width, context = hf_config.integer("n_embd"), hf_config.integer("n_positions", 1024)
    norm = LayerNorm(hf_config.number("layer_norm_epsilon", 1e-5))
    scale = None if hf_config.flag("scale_attn_weights", True) else 1.0
    attention = Attention(hf_config.integer("n_head"), kv_heads, bias=True, scale=scale)
    hidden = hf_config.integer("n_inner", 4 * width)
    feedforward = FeedForward(hidden, hf_config.activation("activation_function", activation))
    block = Block((Sublayer(attention, norm), Sublayer(feedforward, norm)))
    return Decoder(
        vocab=hf_config.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), hf_config.integer("n_layer")),),
        position=Learned(context),
        norm=norm,
        tied=hf_config.flag("tie_word_embeddings", True),
        context=context,
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, _ = bodies(model.blocks[0], Attention, FeedForward)
    settings = common_config("gpt2", "GPT2LMHeadModel", model, LEGACY_ACTIVATION_NAMES)
    return check_roundtrip("gpt2", model, settings | {"scale_attn_weights": attention.scale != 1.0}, spec)


def common_config(
    model_type: str, architecture: str, model: Decoder, activation_names: dict[Activation, str]
) -> dict[str, Any]:
    """The keys that GPT-2, GPTBigCode and GPT-J have."""
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": model.vocab,
        "n_embd": model.width,
        "n_positions": getattr(model.position, "length", model.context),
        "n_layer": len(model.blocks),
        "n_head": attention.heads,
        "n_inner": feedforward.hidden_dim(model.width),
        "activation_function": activation_names[feedforward.activation],
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
        "tie_word_embeddings": model.tied,
    }


def table(model: Decoder) -> Table:
    return TABLE
