"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 with attention in the layers that are named, SwiGLU behind each.

Half of each head is turned by RoPE. Dropout and the z loss are choices of the training run and are not taken over.
"""

from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.hybrid import first, last, sizes
from regard.families.common.rope_config import rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.jamba import IGNORED, LINKS, MIXER
from regard.families.mamba2 import limits, mixer, time_step_limit
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import RMSNorm
from regard.parts.ssm.mamba2 import Mamba2
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("bamba", config)
    theirs.only("hidden_act", "silu")
    width, depth = theirs.integer("hidden_size"), theirs.integer("num_hidden_layers")
    norm = RMSNorm(theirs.number("rms_norm_eps", 1e-5))
    heads = theirs.integer("num_attention_heads")
    attention = Attention(
        heads=heads,
        kv_heads=theirs.integer("num_key_value_heads", 8),
        head_dim=theirs.integer("head_dim", width // max(heads, 1)),
        position=rope(theirs, share=0.5),
        bias=theirs.flag("attention_bias", False),
    )
    expand, mamba_heads = theirs.integer("mamba_expand", 2), theirs.integer("mamba_n_heads", 128)
    head_dim = expand * width // max(mamba_heads, 1)
    if theirs.values.get("mamba_d_head") != "auto":
        theirs.only("mamba_d_head", head_dim)
    shortest, longest = limits(theirs)
    mamba = Mamba2(
        state=theirs.integer("mamba_d_state", 256),
        head_dim=head_dim,
        expand=expand,
        groups=theirs.integer("mamba_n_groups", 1),
        taps=theirs.integer("mamba_d_conv", 4),
        bias=theirs.flag("mamba_proj_bias", False),
        conv_bias=theirs.flag("mamba_conv_bias", True),
        norm=norm,
        shortest=shortest,
        longest=longest,
    )
    feedforward = SwiGLU(theirs.integer("intermediate_size"), bias=theirs.flag("mlp_bias", False))
    attentive, recurrent = (Block((Sublayer(body, norm), Sublayer(feedforward, norm))) for body in (attention, mamba))
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=among(recurrent, attentive, depth, theirs.each("attn_layer_indices", int, ())),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", False),
        context=theirs.integer("max_position_embeddings", 262144),
    )


def among(usual: Block, rare: Block, depth: int, places: tuple[int, ...]) -> tuple[Repeat, ...]:
    """The usual block, with the rare one in these places."""
    places = tuple(sorted({*places}))
    if places and not 0 <= places[0] <= places[-1] < depth:
        raise FamilyError(f"bamba: attn_layer_indices={places!r:.80} should be layers of {depth}")
    runs = []
    for before, place in zip((-1, *places), (*places, depth), strict=True):
        runs += [Repeat((usual,), place - before - 1)] if place - before > 1 else []
        runs += [Repeat((rare,))] if place < depth else []
    return tuple(runs)


def config(model: Decoder) -> dict[str, Any]:
    mixers, feedforwards = zip(*(bodies(block, Body, SwiGLU) for block in model.blocks), strict=True)
    attention, mamba = first(mixers, Attention, Attention(1)), first(mixers, Mamba2, Mamba2(head_dim=1))
    heads, kv_heads, head_dim = attention.sizes(model.width)
    written = {
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": feedforwards[0].hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attn_layer_indices": [i for i, body in enumerate(mixers) if isinstance(body, Attention)],
        "rope_parameters": rope_parameters(attention.position, share=0.5),
        "attention_bias": attention.bias,
        "mlp_bias": feedforwards[0].bias,
        "mamba_n_heads": mamba.sizes(model.width)[0],
        "mamba_d_head": mamba.head_dim,
        **sizes(mamba),
        "mamba_n_groups": mamba.groups,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        "time_step_limit": time_step_limit(mamba),
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("bamba", model, written, spec)


def table(model: Decoder) -> Table:
    links = (*LINKS, *mixer("model.layers.{i}.mamba", f"{MIXER}.body"))
    return Table(*links, *last(model, {Attention: "self_attn.o_proj", Mamba2: "mamba.out_proj"}), ignored=IGNORED)
