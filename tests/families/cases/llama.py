"""Llama with every kind of RoPE."""

from tests.families.cases import VOCAB, WIDE, Cases

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **WIDE,
}


def rope(kind: str, **settings) -> dict:
    return LLAMA | {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


CASES: Cases = {
    f"llama: {name}": ("LlamaForCausalLM", settings)
    for name, settings in {
        "grouped-query": LLAMA | {"num_key_value_heads": 2},
        "tied": LLAMA | {"tie_word_embeddings": True},
        "one layer, multi-query": LLAMA | {"num_hidden_layers": 1, "num_key_value_heads": 1},
        "own head_dim": LLAMA | {"head_dim": 20, "num_key_value_heads": 2},
        "biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
        "another base and epsilon": rope("default", rope_theta=500000.0) | {"rms_norm_eps": 1e-3},
        "linear": rope("linear", factor=4.0),
        "dynamic": rope("dynamic", factor=2.0),
        "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
        "yarn, all said": rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0, attention_factor=0.9
        ),
        "llama3": rope(
            "llama3", factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    }.items()
}
