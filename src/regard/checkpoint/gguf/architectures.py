"""What llama.cpp calls the keys and tensors of families that are known here: a table of words, and no weights twice.

In Llama files the rows of q and k are reordered, so that RoPE turns neighbours instead of halves; in GPT-2 files the
matrices are transposed. A key of an architecture that stands in no table is refused, and never passed over.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.families import FamilyError
from regard.spec import nearest
from regard.weights.ops import InterleavePairs, Op, Transpose
from regard.weights.table import Link, Table

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
HEADS = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GPT2_SIZES = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


def renamed(names: Mapping[str, str], ops: Mapping[str, Op] | None = None, ignored: tuple[str, ...] = ()) -> Table:
    """Names without their last step, which both sides share."""
    steps = {name: (op,) for name, op in (ops or {}).items()}
    return Table(
        *(Link(f"{a}.{{leaf}}", f"{b}.{{leaf}}", *steps.get(a, ())) for a, b in names.items()), ignored=ignored
    )


OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
OLMO2 = {name: theirs for name, theirs in INSIDE.items() if not name.endswith("norm")} | QK_NORMS | NORMS_AFTER
GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{i}.attn_norm": "transformer.h.{i}.ln_1",
    "blk.{i}.attn_qkv": "transformer.h.{i}.attn.c_attn",
    "blk.{i}.attn_output": "transformer.h.{i}.attn.c_proj",
    "blk.{i}.ffn_norm": "transformer.h.{i}.ln_2",
    "blk.{i}.ffn_up": "transformer.h.{i}.mlp.c_fc",
    "blk.{i}.ffn_down": "transformer.h.{i}.mlp.c_proj",
}


def layers(inside: Mapping[str, str]) -> dict[str, str]:
    return OUTSIDE | {f"blk.{{i}}.{theirs}": f"model.layers.{{i}}.{name}" for theirs, name in inside.items()}


def llama(config: Mapping[str, Any]) -> Table:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    turned = {"blk.{i}.attn_q": InterleavePairs(heads), "blk.{i}.attn_k": InterleavePairs(kv_heads)}
    return renamed(layers(INSIDE), turned, ignored=("rope_freqs.weight",))  # read with the config


def gpt2(config: Mapping[str, Any]) -> Table:
    matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return renamed(GPT2, {f"blk.{{i}}.{name}": Transpose() for name in matrices})


@dataclass(frozen=True)
class Architecture:
    """`sizes` must be there, `more` may; files leave `fixed` unsaid; `flags` are said by the presence of a tensor."""

    model_type: str
    sizes: Mapping[str, str]
    names: Callable[[Mapping[str, Any]], Table]
    more: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    rope: bool = True


BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
ARCHITECTURES = {
    "llama": Architecture("llama", SIZES, llama, HEADS, flags=BIASES),
    "granite": Architecture("granite", SIZES | SCALES, llama, HEADS, flags=BIASES),
    "olmo2": Architecture("olmo2", SIZES, lambda config: renamed(layers(OLMO2)), HEADS),
    "qwen2": Architecture("qwen2", SIZES, lambda config: renamed(layers(INSIDE)), HEADS),
    "qwen3": Architecture(
        "qwen3", SIZES, lambda config: renamed(layers(INSIDE | QK_NORMS)), HEADS,
        flags={"attention_bias": "blk.0.attn_q.bias"},
    ),
    "gpt2": Architecture(
        "gpt2", GPT2_SIZES, gpt2, {"vocab_size": "vocab_size"}, {"activation_function": "gelu_new"}, rope=False
    ),
}  # fmt: skip


def architecture(name: object) -> Architecture:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise FamilyError(
            f"GGUF files of architecture {name!r:.80} have no family here; {nearest(str(name), ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
