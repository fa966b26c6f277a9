"""Zamba2 (Glorioso et al. 2024): Mamba-2 layers, in front of some a block of attention that they share in turns.

The shared block reads the stream beside the embeddings, and each layer changes it by adapters of its own. Their files
keep it under the first layer that has it, and all its adapters with it. Dropout is not taken over.
"""

from dataclasses import replace
from itertools import count, groupby
from typing import Any

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.hybrid import last, sizes
from regard.families.common.rope_config import rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip, require_type
from regard.families.mamba2 import mixer
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated
from regard.parts.norm import NoNorm, RMSNorm
from regard.parts.position.base import NoPosition
from regard.parts.shared_block import SharedBlock
from regard.parts.ssm.mamba2 import Mamba2
from regard.weights.ops import Split
from regard.weights.table import Link, Table

LAYER, SHARED = "stack.blocks.{i}.sublayers.0", "model.layers.{i}.shared_transformer"
WORDS = {"mamba": False, "linear_attention": False, "hybrid": True}
USUAL = ["hybrid" if letter == "h" else "mamba" for letter in "m" + "mmmmmh" * 7 + "mmmmh" + "mmmh" + "mm"]
GATE_UP = tuple(f"{LAYER}.body.block.feedforward.{proj}_proj.base.{{leaf}}" for proj in ("gate", "up"))

LINKS = (
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link("model.layers.{i}.input_layernorm.weight", f"{LAYER}.norm.weight"),
    Link("model.layers.{i}.mamba_decoder.input_layernorm.weight", f"{LAYER}.body.norm.weight"),
    Link("model.layers.{i}.mamba_decoder.mamba.out_proj.{leaf}", f"{LAYER}.body.mixer.o_proj.{{leaf}}"),
    Link(f"{SHARED}.input_layernorm.weight", f"{LAYER}.body.block.attention_norm.weight"),
    Link(f"{SHARED}.self_attn.{{proj}}.weight", f"{LAYER}.body.block.attention.{{proj}}.weight"),
    Link(f"{SHARED}.self_attn.{{proj}}.weight", f"{LAYER}.body.block.attention.{{proj}}.base.weight"),
    Link(f"{SHARED}.pre_ff_layernorm.weight", f"{LAYER}.body.block.feedforward_norm.weight"),
    Link(f"{SHARED}.feed_forward.gate_up_proj.{{leaf}}", GATE_UP, Split()),
    Link(f"{SHARED}.feed_forward.down_proj.{{leaf}}", f"{LAYER}.body.block.feedforward.down_proj.{{leaf}}"),
    Link("model.final_layernorm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("zamba2", config)
    theirs.only("use_long_context", False)
    theirs.only("tie_word_embeddings", True)  # else theirs ties nothing, blocks included
    width, heads = theirs.integer("hidden_size"), theirs.integer("num_attention_heads")
    head_dim = 2 * width // max(heads, 1)
    theirs.only("attention_head_dim", head_dim)
    norm, bias = RMSNorm(theirs.number("rms_norm_eps", 1e-5)), theirs.flag("add_bias_linear", False)
    position = rope(theirs) if theirs.flag("use_mem_rope", False) else NoPosition()
    kv_heads, scale = theirs.integer("num_key_value_heads", heads), (head_dim / 2) ** -0.5
    attention = Attention(heads, kv_heads, head_dim, position, scale=scale)
    hidden, activation = theirs.integer("intermediate_size", 4 * width), theirs.choice("hidden_act", OURS, "gelu")
    feedforward = Gated(hidden, activation, bias=bias)
    expand, groups = theirs.integer("mamba_expand", 2), theirs.integer("mamba_ngroups", 1)
    mamba = Mamba2(
        state=theirs.integer("mamba_d_state", 64),
        head_dim=expand * width // max(theirs.integer("n_mamba_heads", 8), 1),
        expand=expand,
        groups=groups,
        taps=theirs.integer("mamba_d_conv", 4),
        bias=bias,
        norm=RMSNorm(1e-5),
        norm_parts=groups,
        shortest=theirs.number("time_step_min", 0.001) or None,
    )
    rank, adapted = theirs.integer("adapter_rank", 128), theirs.flag("use_shared_attention_adapter", False)
    theirs.only("num_key_value_heads", heads if adapted else kv_heads)
    words, shared = theirs.each("layers_block_type", str, USUAL), theirs.integer("num_mem_blocks", 1)
    if len(words) != theirs.integer("num_hidden_layers", 54) or not {"hybrid"} <= {*words} <= WORDS.keys():
        raise FamilyError(
            f"zamba2: layers_block_type={words!r:.80} should be a word a layer, mamba or hybrid, some hybrid"
        )
    hybrid = SharedBlock(attention, feedforward, mamba, 0, norm, rank if adapted else None, rank)
    numbers, plain = count(), Block((Sublayer(mamba, norm),))
    blocks = [
        Block((Sublayer(replace(hybrid, number=next(numbers) % max(shared, 1)), NoNorm()),)) if WORDS[word] else plain
        for word in words
    ]
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=tuple(Repeat((block,), len([*run])) for block, run in groupby(blocks)),
        norm=norm,
        context=theirs.integer("max_position_embeddings", 4096),
    )


def config(model: Decoder) -> dict[str, Any]:
    mixers = [bodies(block, object)[0] for block in model.blocks]
    shared = require_type(next((body for body in mixers if isinstance(body, SharedBlock)), mixers[0]), SharedBlock)
    attention, mamba = shared.attention, require_type(shared.mixer, Mamba2)
    written = {
        "model_type": "zamba2",
        "architectures": ["Zamba2ForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": shared.feedforward.hidden_dim(model.width),
        "num_hidden_layers": len(mixers),
        "layers_block_type": ["hybrid" if isinstance(body, SharedBlock) else "mamba" for body in mixers],
        "num_mem_blocks": len({body.number for body in mixers if isinstance(body, SharedBlock)}),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.sizes(2 * model.width)[1],
        "use_shared_attention_adapter": shared.attention_rank is not None,
        "adapter_rank": shared.rank or 1,
        "use_mem_rope": attention.position != NoPosition(),
        "rope_parameters": rope_parameters(attention.position),
        "hidden_act": THEIRS[shared.feedforward.activation],
        "add_bias_linear": mamba.bias,
        **sizes(mamba),
        "n_mamba_heads": mamba.sizes(model.width)[0],
        "mamba_ngroups": mamba.groups,
        "time_step_min": mamba.shortest or 0.0,
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
        "tie_word_embeddings": True,
    }
    return check_roundtrip("zamba2", model, written, spec)


def table(model: Decoder) -> Table:
    mixers = [block.sublayers[0].body for block in model.blocks]
    shared = {i: body for i, body in enumerate(mixers) if isinstance(body, SharedBlock)}
    homes = {body.number: i for i, body in reversed(shared.items())}  # the first layer of each number
    adapters = [link for use, (i, body) in enumerate(shared.items()) for link in adapter(i, homes[body.number], use)]
    groups = require_type(shared[homes[0]].mixer, Mamba2).groups
    places = {"model.layers.{i}.mamba": f"{LAYER}.body", "model.layers.{i}.mamba_decoder.mamba": f"{LAYER}.body.mixer"}
    inner = [link for theirs, ours in places.items() for link in mixer(theirs, ours, groups)]
    outs = last(model, {Mamba2: "mamba.out_proj", SharedBlock: "linear"})
    return Table(*LINKS, *inner, *outs, *adapters, ignored=("lm_head.weight",))


def adapter(layer: int, home: int, use: int) -> list[Link]:
    """A layer's own matrices: theirs stand with the block, counted over all layers that share any."""
    ours, theirs = f"stack.blocks.{layer}.sublayers.0.body.block", f"model.layers.{home}.shared_transformer"
    gate, up = (f"{ours}.feedforward.{proj}_proj.adapter" for proj in ("gate", "up"))
    packed, apart = f"{theirs}.feed_forward.gate_up_proj_adapter_list.{use}", f"adapter_list.{use}"
    return [
        Link(f"{packed}.0.weight", f"{gate}.0.weight"),
        Link(f"{packed}.1.weight", (f"{gate}.1.weight", f"{up}.1.weight"), Split()),
        Link(f"{theirs}.self_attn.linear_{{p}}_{apart}.{{path}}", f"{ours}.attention.{{p}}_proj.adapter.{{path}}"),
    ]
