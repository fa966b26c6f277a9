"""MPT (MosaicML 2023): ALiBi as the only position, LayerNorm before every sublayer, no biases.

`clip_qkv` bounds queries, keys and values. The class in `transformers` ignores some keys of the config: other norms,
scaled logits and biases are refused; `alibi_bias_max` (flatter slopes, as in StoryWriter) is read but not written.
"""

from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.names import ATTENTION, FEEDFORWARD, QKV
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.parts.position.alibi import Alibi
from regard.weights.ops import Split
from regard.weights.table import Link, Table

TABLE = Table(
    Link("transformer.wte.weight", "embedding.weight"),
    Link("transformer.blocks.{i}.norm_1.weight", f"{ATTENTION}.norm.weight"),
    Link("transformer.blocks.{i}.attn.Wqkv.{leaf}", QKV, Split()),
    Link("transformer.blocks.{i}.attn.out_proj.weight", f"{ATTENTION}.body.o_proj.weight"),
    Link("transformer.blocks.{i}.norm_2.weight", f"{FEEDFORWARD}.norm.weight"),
    Link("transformer.blocks.{i}.ffn.{proj}.weight", f"{FEEDFORWARD}.body.{{proj}}.weight"),
    Link("transformer.norm_f.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
    prefix="transformer.",
    ignored=("lm_head.weight",),
)
SUPPORTED = {"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "norm_type": "low_precision_layernorm"}
SUPPORTED_ATTENTION = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "qk_ln": False,
    "prefix_lm": False,
    "attn_uses_sequence_id": False,
}


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("mpt", config)
    settings = hf_config.nested("attn_config")
    for key, value in SUPPORTED.items():
        hf_config.accept_only(key, value)
    for key, value in SUPPORTED_ATTENTION.items():
        settings.accept_only(key, value)
    width = hf_config.integer("d_model")
    clip, scale = settings.number_or_none("clip_qkv"), settings.number_or_none("softmax_scale")
    position = Alibi(exponent=settings.number("alibi_bias_max", 8))
    attention = Attention(hf_config.integer("n_heads"), position=position, clip=clip or None, scale=scale)
    norm = LayerNorm(hf_config.number("layer_norm_epsilon", 1e-5), bias=False)
    block = Block((Sublayer(attention, norm), Sublayer(FeedForward(4 * width, "gelu", bias=False), norm)))
    return Decoder(
        vocab=hf_config.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), hf_config.integer("n_layers")),),
        norm=norm,
        tied=hf_config.flag("tie_word_embeddings", True),
        context=hf_config.integer("max_seq_len", 2048),
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, _ = bodies(model.blocks[0], Attention, FeedForward)
    if isinstance(attention.position, Alibi) and attention.position.exponent != 8:
        raise FamilyError(f"transformers' mpt supports only ALiBi with exponent=8, found {attention.position}")
    settings = {
        "model_type": "mpt",
        "architectures": ["MptForCausalLM"],
        "vocab_size": model.vocab,
        "d_model": model.width,
        "n_layers": len(model.blocks),
        "n_heads": attention.heads,
        "max_seq_len": model.context,
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
        "attn_config": {"clip_qkv": attention.clip, "softmax_scale": attention.scale},
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("mpt", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
