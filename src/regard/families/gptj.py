"""GPT-J (Wang & Komatsuzaki 2021): attention and feed-forward in parallel after one norm; RoPE in interleaved pairs.

Only the first `rotary_dim` coordinates of each head are rotated. Attention has no biases; the feed-forward and the head
have them.
"""

from typing import Any

from regard.families.common.config_reader import LEGACY_ACTIVATION_NAMES, Config
from regard.families.common.names import BLOCK, FEEDFORWARD, attention_links, module_links
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gpt2 import IGNORED, LAYER, common_config
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.rope import Rope
from regard.weights.table import Link, Table

NAMES = {
    "ln_1": f"{BLOCK}.norm",
    "mlp.fc_in": f"{FEEDFORWARD}.body.up_proj",
    "mlp.fc_out": f"{FEEDFORWARD}.body.down_proj",
}
TABLE = Table(
    Link("transformer.wte.weight", "embedding.weight"),
    *attention_links(f"{LAYER}.attn", "q_proj", "k_proj", "v_proj", "out_proj"),
    *module_links(LAYER, NAMES),
    Link("transformer.ln_f.{leaf}", "norm.{leaf}"),
    Link("lm_head.{leaf}", "head.{leaf}"),
    prefix="transformer.",
    ignored=IGNORED,
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("gptj", config)
    width, heads = hf_config.integer("n_embd"), hf_config.integer("n_head")
    norm = LayerNorm(hf_config.number("layer_norm_epsilon", 1e-5))
    rotary_dim, head_dim = hf_config.integer("rotary_dim", 64), width // max(heads, 1)
    if not 0 < rotary_dim <= head_dim:
        raise hf_config.error("rotary_dim", rotary_dim, f"must be from 1 to the head dimension {head_dim}")
    attention = Attention(heads, position=Rope(share=rotary_dim / head_dim, layout="interleaved"))
    hidden = hf_config.integer("n_inner", 4 * width)
    feedforward = FeedForward(hidden, hf_config.activation("activation_function", "gelu_new"))
    block = Block((Sublayer(attention, NoNorm()), Sublayer(feedforward, NoNorm())), "parallel", norm)
    return Decoder(
        vocab=hf_config.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), hf_config.integer("n_layer")),),
        norm=norm,
        tied=hf_config.flag("tie_word_embeddings", False),
        context=hf_config.integer("n_positions", 2048),
        head_bias=True,
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, _ = bodies(model.blocks[0], Attention, FeedForward)
    rotary_dim = round(getattr(attention.position, "share", 1.0) * attention.sizes(model.width)[2])
    settings = common_config("gptj", "GPTJForCausalLM", model, LEGACY_ACTIVATION_NAMES) | {"rotary_dim": rotary_dim}
    return check_roundtrip("gptj", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
