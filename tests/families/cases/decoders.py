"""Llama with every rope scaling, and its relatives: windows, biases, other norms, fused weights, no positions."""

from tests.families.cases import LARGE_INIT, VOCAB, Cases

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **LARGE_INIT,
}
LLAMA = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
FULL, SLIDING = "full_attention", "sliding_attention"
# The tested sequences have 33 tokens.
WINDOWS = {f"window of {size}": {"sliding_window": size} for size in (32, 33, 34)}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [2.0, 3, 4, 6, 8, 9],
}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 9, "sliding_window": 5}


def rope(rope_type: str, **settings) -> dict:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **settings}}


def make_cases(prefix: str, model: str, base: dict, changes: dict[str, dict]) -> Cases:
    return {f"{prefix}: {name}": (model, base | change) for name, change in changes.items()}


CASES: Cases = (
    make_cases(
        "llama",
        "LlamaForCausalLM",
        LLAMA,
        {
            "grouped-query": {"num_key_value_heads": 2},
            "tied": {"tie_word_embeddings": True},
            "one layer, multi-query": {"num_hidden_layers": 1, "num_key_value_heads": 1},
            "explicit head_dim": {"head_dim": 20, "num_key_value_heads": 2},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "another base and epsilon": rope("default", rope_theta=500000.0) | {"rms_norm_eps": 1e-3},
            "linear": rope("linear", factor=4.0),
            "dynamic": rope("dynamic", factor=2.0),
            "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
            "yarn with all options": rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=8.0,
                beta_slow=2.0,
                attention_factor=0.9,
            ),
            "llama3": rope(
                "llama3", factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0
            ),
        },
    )
    | make_cases(
        "mistral",
        "MistralForCausalLM",
        SHAPE | {"sliding_window": 5},
        {
            "window shorter than the sequence": {},
            **WINDOWS,
            "no window, explicit head_dim, tied": {"sliding_window": None, "head_dim": 20, "tie_word_embeddings": True},
            "one layer, multi-query, window of two": {
                "num_hidden_layers": 1,
                "num_key_value_heads": 1,
                "sliding_window": 2,
            },
        },
    )
    | make_cases(
        "qwen2",
        "Qwen2ForCausalLM",
        SHAPE,
        {
            "windows after two layers": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
            "no windows, tied": {"tie_word_embeddings": True, "sliding_window": 5},
            "one layer, multi-query": {"num_hidden_layers": 1, "num_key_value_heads": 1},
            "windows from a list, yarn": {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": [SLIDING, FULL, SLIDING],
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
        },
    )
    | make_cases(
        "qwen3",
        "Qwen3ForCausalLM",
        SHAPE | {"head_dim": 20},
        {
            "explicit head_dim": {},
            "biases, tied, windows": {
                "attention_bias": True,
                "tie_word_embeddings": True,
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 1,
            },
            "one layer, multi-query": {"num_hidden_layers": 1, "num_key_value_heads": 1},
        },
    )
    | make_cases(
        "phi3",
        "Phi3ForCausalLM",
        SHAPE | {"rms_norm_eps": 1e-5},
        {
            "grouped-query": {},
            "window, tied": {"sliding_window": 6, "tie_word_embeddings": True},
            "one layer, multi-query, half of each head rotated": {
                "num_hidden_layers": 1,
                "num_key_value_heads": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
            "longrope, short": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 50},
            "longrope, long": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 6},
        },
    )
    | make_cases(
        "granite",
        "GraniteForCausalLM",
        SHAPE,
        {
            "four factors": {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.6,
                "logits_scaling": 7.0,
            },
            "no factors, biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "one layer, multi-query": {"num_hidden_layers": 1, "num_key_value_heads": 1, "residual_multiplier": 0.22},
        },
    )
    | make_cases(
        "olmo2",
        "Olmo2ForCausalLM",
        SHAPE,
        {
            "grouped-query": {},
            "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
            "one layer, multi-query, explicit head_dim": {
                "num_hidden_layers": 1,
                "num_key_value_heads": 1,
                "head_dim": 20,
            },
        },
    )
    | make_cases(
        "gemma2",
        "Gemma2ForCausalLM",
        SHAPE | GEMMA,
        {
            "alternating windows, softcaps": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
            "windows from a list, no softcaps, biases, untied": {
                "layer_types": [FULL, FULL, SLIDING],
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
            "one layer, multi-query, explicit head_dim": {
                "num_hidden_layers": 1,
                "num_key_value_heads": 1,
                "head_dim": 20,
                "query_pre_attn_scalar": 20,
                "tie_word_embeddings": False,
            },
            **WINDOWS,
        },
    )
    | make_cases(
        "gemma3",
        "Gemma3ForCausalLM",
        SHAPE | GEMMA,
        {
            "two ropes": {"num_hidden_layers": 4, "sliding_window_pattern": 3},
            "two ropes, one scaled": {
                "layer_types": [SLIDING, FULL, SLIDING],
                "rope_parameters": {
                    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                    FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                },
                "final_logit_softcapping": 4.0,
            },
            "full attention in all layers, biases, untied": {
                "layer_types": [FULL] * 3,
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
            "one layer, multi-query, explicit head_dim": {
                "num_hidden_layers": 1,
                "num_key_value_heads": 1,
                "head_dim": 20,
                "tie_word_embeddings": False,
            },
            **WINDOWS,
        },
    )
    | make_cases(
        "smollm3",
        "SmolLM3ForCausalLM",
        SHAPE,
        {
            "every third layer without positions": {"num_hidden_layers": 4, "no_rope_layer_interval": 3},
            "windows in layers without positions, biases": {
                "no_rope_layers": [0, 1, 0],
                "use_sliding_window": True,
                "sliding_window": 5,
                "attention_bias": True,
                "mlp_bias": True,
            },
            "windows from a list, untied": {
                "no_rope_layers": [0, 1, 1],
                "layer_types": [SLIDING, SLIDING, FULL],
                "use_sliding_window": True,
                "sliding_window": 5,
                "tie_word_embeddings": False,
            },
            "one layer, multi-query": {"num_hidden_layers": 1, "num_key_value_heads": 1},
        },
    )
    | make_cases(
        "cohere2",
        "Cohere2ForCausalLM",
        SHAPE | {"sliding_window": 5, "logit_scale": 0.3},
        {
            "full attention in every third layer": {"num_hidden_layers": 4, "sliding_window_pattern": 3},
            "windows from a list, biases, untied": {
                "layer_types": [FULL, SLIDING, SLIDING],
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
            "one layer, multi-query": {"num_hidden_layers": 1, "num_key_value_heads": 1},
            "full attention in all layers": {"layer_types": [FULL] * 3},
            **WINDOWS,
        },
    )
)
