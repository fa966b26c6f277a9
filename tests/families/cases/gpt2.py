"""GPT-2."""

from tests.families.cases import VOCAB, WIDE, Cases

GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4, **WIDE}
CASES: Cases = {
    f"gpt2: {name}": ("GPT2LMHeadModel", GPT2 | settings)
    for name, settings in {
        "tied": {},
        "untied": {"tie_word_embeddings": False},
        "one layer, one head": {"n_layer": 1, "n_head": 1},
        "another width inside": {"n_inner": 56, "activation_function": "gelu"},
        "unscaled scores": {"scale_attn_weights": False, "initializer_range": 0.1},
        "relu, another epsilon": {"activation_function": "relu", "layer_norm_epsilon": 1e-3},
    }.items()
}
