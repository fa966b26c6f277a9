"""Llama (Touvron et al. 2023): RMSNorm before every sublayer, grouped-query attention with RoPE, SwiGLU, no biases.

Many families are this with a change, and read and write by these functions with what differs. `DEFAULTS` is what a
family's class takes for keys that its config leaves out. Dropout is a choice of the training run and is not taken over.
"""

from typing import Any

from regard.families.common.activations import THEIRS
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.rope_config import rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, tiled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import PositionWise, SwiGLU
from regard.parts.norm import Norm, RMSNorm
from regard.parts.position.rope import Rope
from regard.weights.table import Link, Table

LAYER, ATTENTION, FEEDFORWARD = "model.layers.{i}", "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"
ENDS = (
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link("model.norm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
)
PROJECTIONS = (
    Link(f"{LAYER}.self_attn.{{proj}}_proj.{{leaf}}", f"{ATTENTION}.body.{{proj}}_proj.{{leaf}}"),
    Link(f"{LAYER}.mlp.{{proj}}_proj.{{leaf}}", f"{FEEDFORWARD}.body.{{proj}}_proj.{{leaf}}"),
)
NORMS = (
    Link(f"{LAYER}.input_layernorm.weight", f"{ATTENTION}.norm.weight"),
    Link(f"{LAYER}.post_attention_layernorm.weight", f"{FEEDFORWARD}.norm.weight"),
)
QK_NORMS = (Link(f"{LAYER}.self_attn.{{side}}_norm.weight", f"{ATTENTION}.body.{{side}}_norm.norm.weight"),)
IGNORED = ("lm_head.weight", "model.layers.{i}.self_attn.rotary_emb.inv_freq")

TABLE = Table(*ENDS, *PROJECTIONS, *NORMS, prefix="model.", ignored=IGNORED)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("llama", config)
    return decoder(theirs, pre(theirs, attention(theirs), feedforward(theirs, theirs.flag("mlp_bias", False))))


def config(model: Decoder) -> dict[str, Any]:
    mixer, inner = bodies(model.blocks[0], Attention, SwiGLU)
    if model.width % mixer.heads:
        raise FamilyError(f"transformers' llama wants width={model.width} to be divisible by heads={mixer.heads}")
    own = {"attention_bias": mixer.bias, "mlp_bias": inner.bias}
    return check_roundtrip("llama", model, written("LlamaForCausalLM", "llama", model, mixer, inner) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE


def attention(theirs: Config, position: Rope | None = None) -> Attention:
    width, heads = theirs.integer("hidden_size"), theirs.integer("num_attention_heads")
    return Attention(
        heads=heads,
        kv_heads=theirs.integer("num_key_value_heads", heads),
        head_dim=theirs.integer("head_dim", width // max(heads, 1)),
        position=position or rope(theirs),
        bias=theirs.flag("attention_bias", False),
    )


def feedforward(theirs: Config, bias: bool = False) -> SwiGLU:
    theirs.only("hidden_act", "silu")
    return SwiGLU(theirs.integer("intermediate_size"), bias=bias)


def norm(theirs: Config) -> RMSNorm:
    return RMSNorm(theirs.number("rms_norm_eps", 1e-6))


def pre(theirs: Config, mixer: Body, inner: Body) -> Block:
    return Block((Sublayer(mixer, norm(theirs)), Sublayer(inner, norm(theirs))))


def decoder(theirs: Config, layers: Block | tuple[Repeat, ...], top: Norm | None = None) -> Decoder:
    """The model of these layers, or of one block over and over, under a norm that is mostly the layers' own."""
    if isinstance(layers, Block):
        layers = tiled((layers,), theirs.integer("num_hidden_layers"))
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=theirs.integer("hidden_size"),
        layers=layers,
        norm=top or norm(theirs),
        tied=theirs.flag("tie_word_embeddings", False),
        context=theirs.integer("max_position_embeddings", 2048),
    )


def written(
    architecture: str, model_type: str, model: Decoder, mixer: Attention, inner: PositionWise
) -> dict[str, Any]:
    """What all these families have words for."""
    heads, kv_heads, head_dim = mixer.sizes(model.width)
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": inner.hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": THEIRS[inner.activation],
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
        "rope_parameters": rope_parameters(mixer.position),
        "tie_word_embeddings": model.tied,
    }
