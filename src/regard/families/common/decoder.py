"""Decoders in the keys and tensor names of Llama, with which most later families agree.

A family passes the parts in which it differs. The defaults of its class are arguments, or are merged into its config.
"""

from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config, FamilyError
from regard.families.common.names import ATTENTION, FEEDFORWARD
from regard.families.common.rope_config import read_rope, rope_parameters
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, repeat_blocks
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import Gated, PositionWise, SwiGLU
from regard.parts.norm import Norm, RMSNorm
from regard.parts.position.rope import Rope
from regard.weights.table import Link, Table

LAYER = "model.layers.{i}"
EMBEDDING_AND_HEAD = (
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link("model.norm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
)
ATTENTION_PROJECTIONS = Link(f"{LAYER}.self_attn.{{proj}}_proj.{{leaf}}", f"{ATTENTION}.body.{{proj}}_proj.{{leaf}}")
FEEDFORWARD_PROJECTIONS = Link(f"{LAYER}.mlp.{{proj}}_proj.{{leaf}}", f"{FEEDFORWARD}.body.{{proj}}_proj.{{leaf}}")
PROJECTIONS = (ATTENTION_PROJECTIONS, FEEDFORWARD_PROJECTIONS)
NORMS = (
    Link(f"{LAYER}.input_layernorm.weight", f"{ATTENTION}.norm.weight"),
    Link(f"{LAYER}.post_attention_layernorm.weight", f"{FEEDFORWARD}.norm.weight"),
)
QK_NORMS = (Link(f"{LAYER}.self_attn.{{side}}_norm.weight", f"{ATTENTION}.body.{{side}}_norm.norm.weight"),)
IGNORED = ("lm_head.weight", f"{LAYER}.self_attn.rotary_emb.inv_freq")


def make_table(*links: Link, prefix: str = "") -> Table:
    """The table of layers with these links, and of Llama's embedding, final norm and head."""
    return Table(*EMBEDDING_AND_HEAD, *links, prefix=prefix, ignored=IGNORED)


LLAMA_TABLE = make_table(*PROJECTIONS, *NORMS, prefix="model.")


def read_attention(hf_config: Config, position: Rope | None = None, kv_heads: int | None = None) -> Attention:
    """`kv_heads` is the default of the family's class; None: as many as heads."""
    width, heads = hf_config.integer("hidden_size"), hf_config.integer("num_attention_heads")
    return Attention(
        heads=heads,
        kv_heads=hf_config.integer("num_key_value_heads", kv_heads or heads),
        head_dim=hf_config.integer("head_dim", width // max(heads, 1)),
        position=position or read_rope(hf_config),
        bias=hf_config.flag("attention_bias", False),
    )


def read_gated(hf_config: Config, bias: bool = False) -> Gated:
    """SwiGLU, or the gated unit of another activation."""
    hidden, activation = hf_config.integer("intermediate_size"), hf_config.activation("hidden_act", "silu")
    return SwiGLU(hidden, bias=bias) if activation == "silu" else Gated(hidden, activation, bias)


def read_swiglu(hf_config: Config, bias: bool = False) -> SwiGLU:
    hf_config.accept_only("hidden_act", "silu")
    return SwiGLU(hf_config.integer("intermediate_size"), bias=bias)


def read_rms_norm(hf_config: Config) -> RMSNorm:
    return RMSNorm(hf_config.number("rms_norm_eps", 1e-6))


def pre_norm_block(hf_config: Config, mixer: Body, feedforward: Body) -> Block:
    norm = read_rms_norm(hf_config)
    return Block((Sublayer(mixer, norm), Sublayer(feedforward, norm)))


def read_decoder(
    hf_config: Config,
    layers: Block | tuple[Repeat, ...],
    norm: Norm | None = None,
    tied: bool = False,
    context: int | None = 2048,
) -> Decoder:
    """The model of these layers, or of one block repeated over the depth.

    `norm` is the final one; None: RMSNorm. `tied` and `context` are the defaults of the family's class; a class
    without `max_position_embeddings` has the context None.
    """
    if isinstance(layers, Block):
        layers = repeat_blocks((layers,), hf_config.integer("num_hidden_layers"))
    return Decoder(
        vocab=hf_config.integer("vocab_size"),
        width=hf_config.integer("hidden_size"),
        layers=layers,
        norm=norm or read_rms_norm(hf_config),
        tied=hf_config.flag("tie_word_embeddings", tied),
        context=None if context is None else hf_config.integer("max_position_embeddings", context),
    )


def decoder_config(model_type: str, architecture: str, model: Decoder) -> dict[str, Any]:
    """The keys that decoders of all lineages have."""
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "num_hidden_layers": len(model.blocks),
        "tie_word_embeddings": model.tied,
    }


def llama_config(
    model_type: str, architecture: str, model: Decoder, attention: Attention, feedforward: PositionWise
) -> dict[str, Any]:
    """The keys that Llama and related families have; the attention and feed-forward are those of one layer."""
    return decoder_config(model_type, architecture, model) | {
        "intermediate_size": feedforward.hidden_dim(model.width),
        **head_config(model, attention),
        "hidden_act": ACTIVATION_NAMES[feedforward.activation],
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
        "rope_parameters": rope_parameters(attention.position),
    }


def head_config(model: Decoder, attention: Attention) -> dict[str, int]:
    heads, kv_heads, head_dim = attention.sizes(model.width)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def require_divisible(model_type: str, model: Decoder, heads: int) -> None:
    """Raise FamilyError where the class in transformers computes width / heads, though head_dim is given."""
    if model.width % heads:
        raise FamilyError(
            f"transformers' {model_type} needs width={model.width} to be divisible by heads={heads}; change one"
        )
