"""RWKV-4 (Peng et al. 2023): mixing over time, then over channels, a LayerNorm before each and one on the embeddings.

`rescale_every` halves streams and weights at inference, so that half precision does not overflow: no other model, and
not taken over. The last norm has the usual epsilon, whatever the config says.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.norm import LayerNorm
from regard.parts.rwkv import ChannelMixing, TimeMixing
from regard.weights.ops import Reshape
from regard.weights.table import Link, Table

TIME, CHANNEL = "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"
MIXING = Reshape((1, 1, -1))

TABLE = Table(
    Link("rwkv.embeddings.weight", "embedding.weight"),
    Link("rwkv.blocks.0.pre_ln.{leaf}", "embedding_norm.{leaf}"),
    Link("rwkv.blocks.{i}.ln1.{leaf}", f"{TIME}.norm.{{leaf}}"),
    Link("rwkv.blocks.{i}.attention.time_mix_key", f"{TIME}.body.k_mix.share", MIXING),
    Link("rwkv.blocks.{i}.attention.time_mix_value", f"{TIME}.body.v_mix.share", MIXING),
    Link("rwkv.blocks.{i}.attention.time_mix_receptance", f"{TIME}.body.r_mix.share", MIXING),
    Link("rwkv.blocks.{i}.attention.time_decay", f"{TIME}.body.log_decay"),
    Link("rwkv.blocks.{i}.attention.time_first", f"{TIME}.body.bonus"),
    Link("rwkv.blocks.{i}.attention.key.weight", f"{TIME}.body.k_proj.weight"),
    Link("rwkv.blocks.{i}.attention.value.weight", f"{TIME}.body.v_proj.weight"),
    Link("rwkv.blocks.{i}.attention.receptance.weight", f"{TIME}.body.r_proj.weight"),
    Link("rwkv.blocks.{i}.attention.output.weight", f"{TIME}.body.o_proj.weight"),
    Link("rwkv.blocks.{i}.ln2.{leaf}", f"{CHANNEL}.norm.{{leaf}}"),
    Link("rwkv.blocks.{i}.feed_forward.time_mix_key", f"{CHANNEL}.body.k_mix.share", MIXING),
    Link("rwkv.blocks.{i}.feed_forward.time_mix_receptance", f"{CHANNEL}.body.r_mix.share", MIXING),
    Link("rwkv.blocks.{i}.feed_forward.key.weight", f"{CHANNEL}.body.up_proj.weight"),
    Link("rwkv.blocks.{i}.feed_forward.receptance.weight", f"{CHANNEL}.body.r_proj.weight"),
    Link("rwkv.blocks.{i}.feed_forward.value.weight", f"{CHANNEL}.body.down_proj.weight"),
    Link("rwkv.ln_out.{leaf}", "norm.{leaf}"),
    Link("head.weight", "head.weight"),
    ignored=("head.weight",),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("rwkv", config)
    norm = LayerNorm(theirs.number("layer_norm_epsilon", 1e-5))
    time = TimeMixing(theirs.integer("attention_hidden_size") if theirs.has("attention_hidden_size") else None)
    channel = ChannelMixing(theirs.integer("intermediate_size") if theirs.has("intermediate_size") else None)
    block = Block((Sublayer(time, norm), Sublayer(channel, norm)))
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=theirs.integer("hidden_size"),
        layers=(Repeat((block,), theirs.integer("num_hidden_layers")),),
        norm=LayerNorm(1e-5),
        tied=theirs.flag("tie_word_embeddings", False),
        context=theirs.integer("context_length", 1024),
        embedding_norm=norm,
    )


def config(model: Decoder) -> dict[str, Any]:
    time, channel = bodies(model.blocks[0], TimeMixing, ChannelMixing)
    written = {
        "model_type": "rwkv",
        "architectures": ["RwkvForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "num_hidden_layers": len(model.blocks),
        "attention_hidden_size": time.hidden,
        "intermediate_size": channel.hidden,
        "context_length": model.context,
        "layer_norm_epsilon": getattr(model.embedding_norm, "eps", None),
        "rescale_every": 0,
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("rwkv", model, written, spec)


def table(model: Decoder) -> Table:
    return TABLE
