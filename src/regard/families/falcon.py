"""Falcon (Almazrouei et al. 2023): attention and feed-forward in parallel, few key/value heads for many query heads.

    7B     one norm for both, multi-query           RW     sequential sublayers, multi-head, ALiBi, biases
    40B    a norm for each, grouped-query           11B    one norm for both, grouped-query

Queries, keys and values are fused per key/value head. ALiBi is scaled like the scores. transformers rounds it to
bfloat16 in models of every dtype, which ours does not do; the difference is visible from 16 heads on, where slopes are
no longer powers of two.
"""

from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.decoder import decoder_config, read_decoder
from regard.families.common.names import ATTENTION, BLOCK, FEEDFORWARD, module_links
from regard.families.common.rope_config import read_rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gpt_neox import layer_links
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.alibi import Alibi
from regard.weights.table import Link, Table

LAYER = "transformer.h.{i}"


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("falcon", config)
    bias = hf_config.flag("bias", False)
    position = Alibi(scaled=True) if hf_config.flag("alibi", False) else read_rope(hf_config)
    attention = Attention(
        hf_config.integer("num_attention_heads"), read_kv_heads(hf_config), position=position, bias=bias
    )
    hidden = hf_config.integer("ffn_hidden_size", 4 * hf_config.integer("hidden_size"))
    feedforward = FeedForward(hidden, hf_config.activation("activation", "gelu"), bias)
    norm = LayerNorm(hf_config.number("layer_norm_epsilon", 1e-5))
    return read_decoder(hf_config, read_block(hf_config, attention, feedforward, norm), norm, tied=True)


def read_kv_heads(hf_config: Config) -> int:
    heads = hf_config.integer("num_attention_heads")
    if hf_config.flag("new_decoder_architecture", False):
        return hf_config.integer("num_kv_heads", heads)
    if hf_config.flag("multi_query", True):
        return 1
    hf_config.accept_only("num_kv_heads", heads)
    return heads


def read_block(hf_config: Config, attention: Attention, feedforward: FeedForward, norm: LayerNorm) -> Block:
    new_architecture = hf_config.flag("new_decoder_architecture", False)
    norms = hf_config.integer("num_ln_in_parallel_attn", 2 if new_architecture else 1)
    if norms not in ((1, 2) if new_architecture else (1,)):
        rule = f"must be {'1 or 2' if new_architecture else '1'} with new_decoder_architecture={new_architecture}"
        raise hf_config.error("num_ln_in_parallel_attn", norms, rule)
    if new_architecture:
        hf_config.accept_only("parallel_attn", True)
    parallel = hf_config.flag("parallel_attn", True)
    if parallel and norms == 1:
        return Block((Sublayer(attention, NoNorm()), Sublayer(feedforward, NoNorm())), "parallel", norm)
    return Block((Sublayer(attention, norm), Sublayer(feedforward, norm)), "parallel" if parallel else "pre")


def config(model: Decoder) -> dict[str, Any]:
    first = model.blocks[0]
    attention, feedforward = bodies(first, Attention, FeedForward)
    heads, kv_heads, _ = attention.sizes(model.width)
    parallel = first.style == "parallel"
    two_norms = parallel and first.norm is None
    settings = decoder_config("falcon", "FalconForCausalLM", model) | {
        "ffn_hidden_size": feedforward.hidden_dim(model.width),
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": two_norms or parallel and kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "parallel_attn": parallel,
        "activation": ACTIVATION_NAMES[feedforward.activation],
        "alibi": isinstance(attention.position, Alibi),
        "rope_parameters": rope_parameters(attention.position),
        "bias": attention.bias,
        "max_position_embeddings": model.context,
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
    }
    return check_roundtrip("falcon", model, settings, spec)


def table(model: Decoder) -> Table:
    first = model.layers[0].blocks[0]
    attention, _ = bodies(first, Attention, FeedForward)
    _, kv_heads, _ = attention.sizes(model.width)
    return Table(
        Link("transformer.word_embeddings.weight", "embedding.weight"),
        *module_links(LAYER, norm_names(first)),
        *layer_links(LAYER, "self_attention", kv_heads),
        Link("transformer.ln_f.{leaf}", "norm.{leaf}"),
        Link("lm_head.weight", "head.weight"),
        prefix="transformer.",
        ignored=("lm_head.weight", f"{LAYER}.self_attention.rotary_emb.inv_freq"),
    )


def norm_names(block: Block) -> dict[str, str]:
    if block.norm is not None:
        return {"input_layernorm": f"{BLOCK}.norm"}
    names = ("ln_attn", "ln_mlp") if block.style == "parallel" else ("input_layernorm", "post_attention_layernorm")
    return dict(zip(names, (f"{ATTENTION}.norm", f"{FEEDFORWARD}.norm"), strict=True))
