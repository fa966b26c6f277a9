"""GPT-2 and older decoders: learned positions, ALiBi, partial RoPE, parallel blocks, multi-query attention."""

from tests.families.cases import LARGE_INIT, VOCAB, Cases

SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **LARGE_INIT}
SHORT = {"max_position_embeddings": 64}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4, **LARGE_INIT}
OPT = {**SIZES, **SHORT, "ffn_dim": 80, "init_std": 0.2}
NEOX = {**SIZES, **SHORT, "hidden_size": 64, "intermediate_size": 80}
PHI = {**SIZES, **SHORT, "intermediate_size": 80}
FALCON = {**SIZES, **SHORT}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4, **LARGE_INIT}
GPTJ = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8, **LARGE_INIT}
BIGCODE = {key: value for key, value in GPTJ.items() if key != "rotary_dim"}
MPT = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **LARGE_INIT}
MPT["use_cache"] = True  # otherwise transformers' generate processes the whole sequence for every new token


def rope(kind: str, **settings) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


CLASSES = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "opt": ("OPTForCausalLM", OPT),
    "gpt_neox": ("GPTNeoXForCausalLM", NEOX),
    "gptj": ("GPTJForCausalLM", GPTJ),
    "phi": ("PhiForCausalLM", PHI),
    "falcon": ("FalconForCausalLM", FALCON),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", BIGCODE),
    "bloom": ("BloomForCausalLM", BLOOM),
    "mpt": ("MptForCausalLM", MPT),
}
VARIANTS = {
    "gpt2": {
        "tied": {},
        "untied": {"tie_word_embeddings": False},
        "one layer, one head": {"n_layer": 1, "n_head": 1},
        "another hidden width": {"n_inner": 56, "activation_function": "gelu"},
        "unscaled scores": {"scale_attn_weights": False, "initializer_range": 0.1},
        "relu, another epsilon": {"activation_function": "relu", "layer_norm_epsilon": 1e-3},
    },
    "opt": {
        "tied": {},
        "350m: narrow embeddings, post-norm": {"word_embed_proj_dim": 20, "do_layer_norm_before": False},
        "narrow embeddings, pre-norm, untied": {"word_embed_proj_dim": 20, "tie_word_embeddings": False},
        "wide embeddings, post-norm, untied": {
            "word_embed_proj_dim": 56,
            "do_layer_norm_before": False,
            "tie_word_embeddings": False,
        },
        "no biases, norms without weights": {"enable_bias": False, "layer_norm_elementwise_affine": False},
        "one layer, one head, gelu, no final norm": {
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "activation_function": "gelu",
            "_remove_final_layer_norm": True,
        },
    },
    "gpt_neox": {
        "a quarter of each head rotated": {},
        "sequential, tied": {"use_parallel_residual": False, "tie_word_embeddings": True},
        "whole heads rotated, linear scaling, no biases": rope("linear", factor=4.0, partial_rotary_factor=1.0)
        | {"attention_bias": False},
        "older rope keys": {"rotary_pct": 0.5, "rotary_emb_base": 500.0},
        "one layer, one head, another epsilon": {
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "layer_norm_eps": 1e-3,
            "hidden_act": "gelu_pytorch_tanh",
        },
    },
    "gptj": {
        "two thirds of each head rotated": {},
        "whole heads rotated, tied": {"rotary_dim": 12, "tie_word_embeddings": True},
        "one layer, one head, a sixth rotated": {"n_layer": 1, "n_head": 1, "n_inner": 56},
        "relu, another epsilon": {"activation_function": "relu", "layer_norm_epsilon": 1e-3},
    },
    "phi": {
        "grouped-query": {"num_key_value_heads": 2},
        "norms of queries and keys, multi-query": {
            "qk_layernorm": True,
            "num_key_value_heads": 1,
            "intermediate_size": 96,
        },
        "explicit head_dim, tied": {"head_dim": 20, "tie_word_embeddings": True, "num_hidden_layers": 1},
        "three quarters of each head rotated, yarn": {"hidden_size": 64}
        | rope("yarn", partial_rotary_factor=0.75, factor=4.0, original_max_position_embeddings=16),
    },
    "falcon": {
        "7b: multi-query, one norm": {},
        "40b: grouped-query, two norms": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "11b: grouped-query, one norm, untied": {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
        "new architecture, multi-query": {"new_decoder_architecture": True, "num_kv_heads": 1},
        "rw: alibi, sequential, biases": {
            "alibi": True,
            "parallel_attn": False,
            "multi_query": False,
            "bias": True,
        },
        "alibi, three heads, parallel": {"alibi": True, "num_attention_heads": 3, "multi_query": False},
        "new architecture, alibi, six heads, three key/value heads": {
            "alibi": True,
            "new_decoder_architecture": True,
            "num_attention_heads": 6,
            "num_kv_heads": 3,
        },
        "one layer, multi-query, sequential": {
            "num_hidden_layers": 1,
            "parallel_attn": False,
            "ffn_hidden_size": 56,
            "activation": "relu",
        },
    },
    "gpt_bigcode": {
        "multi-query": {},
        "multi-head, untied": {"multi_query": False, "tie_word_embeddings": False},
        "one layer, unscaled scores": {"n_layer": 1, "scale_attn_weights": False, "initializer_range": 0.1},
        "another hidden width, three heads": {"n_inner": 56, "n_head": 3, "activation_function": "gelu"},
    },
    "bloom": {
        "four heads": {},
        "three heads, untied": {"n_head": 3, "tie_word_embeddings": False},
        "six heads, another epsilon": {"n_head": 6, "layer_norm_epsilon": 1e-3},
        "one layer, sixteen heads": {"n_layer": 1, "n_head": 16},
    },
    "mpt": {
        "four heads": {},
        "three heads, clipped": {"n_heads": 3, "attn_config": {"clip_qkv": 0.5}},
        "six heads, untied, explicit softmax scale": {
            "n_heads": 6,
            "tie_word_embeddings": False,
            "attn_config": {"softmax_scale": 0.2},
        },
        "one layer, twelve heads": {"n_layers": 1, "n_heads": 12, "layer_norm_epsilon": 1e-3},
    },
}
CASES: Cases = {
    f"{family}: {name}": (CLASSES[family][0], CLASSES[family][1] | settings)
    for family, variants in VARIANTS.items()
    for name, settings in variants.items()
}
