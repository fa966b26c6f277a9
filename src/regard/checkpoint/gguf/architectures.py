"""Tables from llama.cpp's metadata keys and tensor names to the config keys and tensor names of a family.

In Llama files the rows of q and k are permuted, because llama.cpp rotates adjacent pairs of features instead of halves;
in GPT-2 files the matrices are transposed. A metadata key of the architecture that no table lists is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.checkpoint.gguf.rope_metadata import DIVISORS
from regard.families import FamilyError
from regard.spec import suggest_name
from regard.weights.ops import InterleavePairs, Op, Transpose
from regard.weights.table import Link, Table

REQUIRED_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL_KEYS = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}
SCALE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


def rename_modules(
    names: Mapping[str, str], ops: Mapping[str, Op] | None = None, ignored: tuple[str, ...] = ()
) -> Table:
    """A table from module names in the file to the family's, with the op of each module that has one."""
    steps = {name: (op,) for name, op in (ops or {}).items()}
    links = [Link(f"{gguf}.{{leaf}}", f"{hf}.{{leaf}}", *steps.get(gguf, ())) for gguf, hf in names.items()]
    return Table(*links, ignored=ignored)


MODEL_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
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
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
OLMO2_MODULES = {name: module for name, module in LAYER_MODULES.items() if not name.endswith("norm")}
OLMO2_MODULES |= QK_NORMS | POST_NORMS
GPT2_MODULES = {
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


def module_names(layer_modules: Mapping[str, str]) -> dict[str, str]:
    """The full names of all modules: those of every layer, and those outside the layers."""
    in_layers = {f"blk.{{i}}.{name}": f"model.layers.{{i}}.{module}" for name, module in layer_modules.items()}
    return MODEL_MODULES | in_layers


def llama_table(config: Mapping[str, Any]) -> Table:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    permuted = {"blk.{i}.attn_q": InterleavePairs(heads), "blk.{i}.attn_k": InterleavePairs(kv_heads)}
    return rename_modules(module_names(LAYER_MODULES), permuted, ignored=(DIVISORS,))  # read into the config


def gpt2_table(config: Mapping[str, Any]) -> Table:
    matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return rename_modules(GPT2_MODULES, {f"blk.{{i}}.{name}": Transpose() for name in matrices})


@dataclass(frozen=True)
class Architecture:
    """How the metadata of an architecture maps to a family's config.

    required, optional    metadata keys to config keys
    table                 from a config to the table of tensor names
    fixed                 config values that the metadata lacks
    flags                 config flags to tensor names; a flag is true if the file has the tensor
    rope                  whether the model has RoPE
    """

    model_type: str
    required: Mapping[str, str]
    table: Callable[[Mapping[str, Any]], Table]
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    rope: bool = True


BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
ARCHITECTURES = {
    "llama": Architecture("llama", REQUIRED_KEYS, llama_table, OPTIONAL_KEYS, flags=BIASES),
    "granite": Architecture("granite", REQUIRED_KEYS | SCALE_KEYS, llama_table, OPTIONAL_KEYS, flags=BIASES),
    "olmo2": Architecture(
        "olmo2", REQUIRED_KEYS, lambda config: rename_modules(module_names(OLMO2_MODULES)), OPTIONAL_KEYS
    ),
    "qwen2": Architecture(
        "qwen2", REQUIRED_KEYS, lambda config: rename_modules(module_names(LAYER_MODULES)), OPTIONAL_KEYS
    ),
    "qwen3": Architecture(
        "qwen3", REQUIRED_KEYS, lambda config: rename_modules(module_names(LAYER_MODULES | QK_NORMS)), OPTIONAL_KEYS,
        flags={"attention_bias": "blk.0.attn_q.bias"},
    ),
    "gpt2": Architecture(
        "gpt2", GPT2_KEYS, gpt2_table, {"vocab_size": "vocab_size"}, {"activation_function": "gelu_new"}, rope=False
    ),
}  # fmt: skip


def find_architecture(name: object) -> Architecture:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise FamilyError(
            f"GGUF files of the architecture {name!r:.80} are not supported; {suggest_name(str(name), ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
