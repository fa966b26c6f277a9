"""GPT-NeoX (Black et al. 2022; Pythia): attention and feed-forward in parallel, each with its own norm.

RoPE rotates the first quarter of each head. Queries, keys and values are fused per head. Without
`use_parallel_residual` the sublayers are sequential, as in GPT-2.
"""

from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.decoder import decoder_config, read_decoder
from regard.families.common.names import ATTENTION, FEEDFORWARD, QKV, module_links
from regard.families.common.rope_config import read_rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.weights.ops import Split
from regard.weights.table import Link, Table

BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq")  # masks and angles in older files
LAYER = "gpt_neox.layers.{i}"


def spec(config: dict[str, Any]) -> Decoder:
    unused = ("rope_theta", "partial_rotary_factor")  # transformers reads them inside rope_parameters only
    hf_config = Config("gpt_neox", {key: value for key, value in config.items() if key not in unused})
    norm = LayerNorm(hf_config.number("layer_norm_eps", 1e-5))
    base, share = hf_config.number("rotary_emb_base", 10000.0), hf_config.number("rotary_pct", 0.25)
    attention = Attention(
        hf_config.integer("num_attention_heads"),
        position=read_rope(hf_config, base, share),
        bias=hf_config.flag("attention_bias", True),
    )
    feedforward = FeedForward(hf_config.integer("intermediate_size"), hf_config.activation("hidden_act", "gelu"))
    style = "parallel" if hf_config.flag("use_parallel_residual", True) else "pre"
    return read_decoder(hf_config, Block((Sublayer(attention, norm), Sublayer(feedforward, norm)), style), norm)


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    settings = decoder_config("gpt_neox", "GPTNeoXForCausalLM", model) | {
        "intermediate_size": feedforward.hidden_dim(model.width),
        "num_attention_heads": attention.heads,
        "hidden_act": ACTIVATION_NAMES[feedforward.activation],
        "max_position_embeddings": model.context,
        "layer_norm_eps": getattr(model.norm, "eps", None),
        "rope_parameters": rope_parameters(attention.position, share=0.25),
        "attention_bias": attention.bias,
        "use_parallel_residual": model.blocks[0].style == "parallel",
    }
    return check_roundtrip("gpt_neox", model, settings, spec)


def table(model: Decoder) -> Table:
    attention, _ = bodies(model.layers[0].blocks[0], Attention, FeedForward)
    return Table(
        Link("gpt_neox.embed_in.weight", "embedding.weight"),
        *norm_links(LAYER),
        *layer_links(LAYER, "attention", attention.heads),
        Link("gpt_neox.final_layer_norm.{leaf}", "norm.{leaf}"),
        Link("embed_out.weight", "head.weight"),
        prefix="gpt_neox.",
        ignored=("embed_out.weight", *(f"{LAYER}.attention.{name}" for name in BUFFERS)),
        prefix_aliases={"lm_head.": "embed_out."},  # the module's name in transformers 5
    )


def norm_links(layer: str) -> tuple[Link, ...]:
    names = {"input_layernorm": f"{ATTENTION}.norm", "post_attention_layernorm": f"{FEEDFORWARD}.norm"}
    return module_links(layer, names)


def layer_links(layer: str, attention: str, groups: int) -> tuple[Link, ...]:
    """The projections of a layer, also of BLOOM and Falcon; queries, keys and values are fused per group of heads."""
    names = {
        f"{attention}.dense": f"{ATTENTION}.body.o_proj",
        "mlp.dense_h_to_4h": f"{FEEDFORWARD}.body.up_proj",
        "mlp.dense_4h_to_h": f"{FEEDFORWARD}.body.down_proj",
    }
    return Link(f"{layer}.{attention}.query_key_value.{{leaf}}", QKV, Split(groups=groups)), *module_links(layer, names)
