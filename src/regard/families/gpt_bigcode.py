"""GPTBigCode (Ben Allal et al. 2023, SantaCoder and StarCoder): GPT-2 whose heads share one key and one value.

Its linears are stored as (out, in). With a key for every head, queries, keys and values alternate head by head.
"""

from typing import Any

from regard.families import gpt2
from regard.families.common.activations import THEIRS
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gpt2 import ATTENTION, FEEDFORWARD, PACKED
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import FeedForward
from regard.weights.ops import Split
from regard.weights.table import Link, Table


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("gpt_bigcode", config)
    return gpt2.decoder(theirs, 1 if theirs.flag("multi_query", True) else None, "gelu_pytorch_tanh")


def config(model: Decoder) -> dict[str, Any]:
    written = {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], **gpt2.settings(model, THEIRS)}
    written["multi_query"] = key_heads(model) == 1
    return check_roundtrip("gpt_bigcode", model, written, spec)


def key_heads(model: Decoder) -> int:
    attention, _ = bodies(model.layers[0].blocks[0], Attention, FeedForward)
    return attention.sizes(model.width)[1]


def table(model: Decoder) -> Table:
    return Table(
        Link("transformer.wte.weight", "embedding.weight"),
        Link("transformer.wpe.weight", "position.table.weight"),
        Link("transformer.h.{i}.ln_1.{leaf}", f"{ATTENTION}.norm.{{leaf}}"),
        Link("transformer.h.{i}.attn.c_attn.{leaf}", PACKED, Split(groups=key_heads(model))),
        Link("transformer.h.{i}.attn.c_proj.{leaf}", f"{ATTENTION}.body.o_proj.{{leaf}}"),
        Link("transformer.h.{i}.ln_2.{leaf}", f"{FEEDFORWARD}.norm.{{leaf}}"),
        Link("transformer.h.{i}.mlp.c_fc.{leaf}", f"{FEEDFORWARD}.body.up_proj.{{leaf}}"),
        Link("transformer.h.{i}.mlp.c_proj.{leaf}", f"{FEEDFORWARD}.body.down_proj.{{leaf}}"),
        Link("transformer.ln_f.{leaf}", "norm.{leaf}"),
        Link("lm_head.weight", "head.weight"),
        prefix="transformer.",
        ignored=("lm_head.weight", "transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
    )
