"""RWKV-4 (Peng et al. 2023): time mixing, then channel mixing, a LayerNorm before each and one on the embeddings.

`rescale_every` halves hidden states and weights at inference, so that float16 does not overflow. It does not change the
model and is not converted. The final norm always has the default epsilon, as in `transformers`.
"""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.decoder import decoder_config, read_decoder
from regard.families.common.names import ATTENTION, FEEDFORWARD, module_links
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.block import Block, Sublayer
from regard.parts.norm import LayerNorm
from regard.parts.rwkv import ChannelMixing, TimeMixing
from regard.weights.ops import Reshape
from regard.weights.table import Link, Table

BLOCK = "rwkv.blocks.{i}"
TIME, CHANNEL = f"{ATTENTION}.body", f"{FEEDFORWARD}.body"
MODULES = {
    "ln1": f"{ATTENTION}.norm",
    "attention.key": f"{TIME}.k_proj",
    "attention.value": f"{TIME}.v_proj",
    "attention.receptance": f"{TIME}.r_proj",
    "attention.output": f"{TIME}.o_proj",
    "ln2": f"{FEEDFORWARD}.norm",
    "feed_forward.key": f"{CHANNEL}.up_proj",
    "feed_forward.receptance": f"{CHANNEL}.r_proj",
    "feed_forward.value": f"{CHANNEL}.down_proj",
}
TOKEN_SHIFTS = {
    "attention.time_mix_key": f"{TIME}.k_mix.share",
    "attention.time_mix_value": f"{TIME}.v_mix.share",
    "attention.time_mix_receptance": f"{TIME}.r_mix.share",
    "feed_forward.time_mix_key": f"{CHANNEL}.k_mix.share",
    "feed_forward.time_mix_receptance": f"{CHANNEL}.r_mix.share",
}
TABLE = Table(
    Link("rwkv.embeddings.weight", "embedding.weight"),
    Link("rwkv.blocks.0.pre_ln.{leaf}", "embedding_norm.{leaf}"),
    *module_links(BLOCK, MODULES),
    *(Link(f"{BLOCK}.{foreign}", ours, Reshape((1, 1, -1))) for foreign, ours in TOKEN_SHIFTS.items()),
    Link(f"{BLOCK}.attention.time_decay", f"{TIME}.log_decay"),
    Link(f"{BLOCK}.attention.time_first", f"{TIME}.bonus"),
    Link("rwkv.ln_out.{leaf}", "norm.{leaf}"),
    Link("head.weight", "head.weight"),
    ignored=("head.weight",),
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("rwkv", config)
    norm = LayerNorm(hf_config.number("layer_norm_epsilon", 1e-5))
    time = TimeMixing(hf_config.integer_or_none("attention_hidden_size"))
    channel = ChannelMixing(hf_config.integer_or_none("intermediate_size"))
    model = read_decoder(
        hf_config, Block((Sublayer(time, norm), Sublayer(channel, norm))), LayerNorm(1e-5), context=None
    )
    return replace(model, context=hf_config.integer("context_length", 1024), embedding_norm=norm)


def config(model: Decoder) -> dict[str, Any]:
    time, channel = bodies(model.blocks[0], TimeMixing, ChannelMixing)
    settings = decoder_config("rwkv", "RwkvForCausalLM", model) | {
        "attention_hidden_size": time.hidden,
        "intermediate_size": channel.hidden,
        "context_length": model.context,
        "layer_norm_epsilon": getattr(model.embedding_norm, "eps", None),
        "rescale_every": 0,
    }
    return check_roundtrip("rwkv", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
