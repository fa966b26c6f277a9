"""Recurrent and hybrid decoders: Mamba and its relatives, RWKV, Griffin."""

from tests.families.cases import LARGE_INIT, VOCAB, Cases

MAMBA = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, **LARGE_INIT}
MAMBA2 = MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 1}
GRIFFIN = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_window_size": 8,
    "w_init_variance_scale": 1.0,
}
ZAMBA2 = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_attention_heads": 4,
    "adapter_rank": 3,
    "use_shared_attention_adapter": True,
    "use_mem_rope": True,
    "n_mamba_heads": 4,
    "mamba_d_state": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
# With a cache, transformers' Mamba-2 ignores the limits of Δ, and its RWKV mixes the rows of a batch.
NO_CACHE = {"use_cache": False}
RWKV = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "context_length": 64,
    "rescale_every": 0,
    **NO_CACHE,
}
HYBRID = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_state": 4,
    "max_position_embeddings": 64,
    **LARGE_INIT,
}
JAMBA = HYBRID | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
BAMBA = HYBRID | {"attn_layer_indices": [1], "mamba_n_heads": 8, "num_hidden_layers": 3}

CASES: Cases = {
    f"{family}: {name}": (model, base | settings)
    for family, model, base, cases in [
        (
            "mamba",
            "MambaForCausalLM",
            MAMBA,
            {
                "tied": {},
                "untied, biases": {"tie_word_embeddings": False, "use_bias": True, "use_conv_bias": False},
                "one layer, other sizes": {
                    "num_hidden_layers": 1,
                    "state_size": 7,
                    "expand": 3,
                    "time_step_rank": 5,
                    "conv_kernel": 2,
                    "layer_norm_epsilon": 1e-3,
                },
            },
        ),
        (
            "falcon_mamba",
            "FalconMambaForCausalLM",
            MAMBA,
            {
                "tied": {},
                "untied, biases": {"tie_word_embeddings": False, "use_bias": True, "mixer_rms_eps": 1e-3},
                "one layer, other sizes": {"num_hidden_layers": 1, "expand": 1, "time_step_rank": 3, "conv_kernel": 5},
            },
        ),
        (
            "mamba2",
            "Mamba2ForCausalLM",
            MAMBA2,
            {
                "untied": {},
                "tied, groups, biases": {"tie_word_embeddings": True, "n_groups": 4, "use_bias": True},
                "limited steps, one layer": {
                    "num_hidden_layers": 1,
                    **NO_CACHE,
                    "time_step_limit": (0.5, 0.9),
                    "head_dim": 16,
                    "num_heads": 4,
                },
                "lower limit of the steps": {
                    **NO_CACHE,
                    "time_step_limit": (0.6, float("inf")),
                    "use_conv_bias": False,
                    "conv_kernel": 3,
                },
            },
        ),
        (
            "jamba",
            "JambaForCausalLM",
            JAMBA,
            {
                "experts in every other layer": {},
                "two different periods": {
                    "attn_layer_period": 3,
                    "attn_layer_offset": 2,
                    "expert_layer_offset": 0,
                    "num_hidden_layers": 5,
                    "initializer_range": 0.15,
                },
                "no experts, tied, biases": {
                    "num_hidden_layers": 5,
                    "num_experts": 1,
                    "tie_word_embeddings": True,
                    "mamba_proj_bias": True,
                },
                "one layer, multi-query": {
                    "num_hidden_layers": 1,
                    "attn_layer_offset": 0,
                    "expert_layer_offset": 0,
                    "num_key_value_heads": 1,
                    "num_experts_per_tok": 1,
                },
                "no convolution bias, explicit rank": {
                    "mamba_conv_bias": False,
                    "mamba_dt_rank": 3,
                    "mamba_expand": 1,
                    "num_hidden_layers": 2,
                },
            },
        ),
        (
            "bamba",
            "BambaForCausalLM",
            BAMBA,
            {
                "one attention layer": {},
                "two attention layers, groups, tied": {
                    "attn_layer_indices": [0, 2],
                    "mamba_n_groups": 2,
                    "tie_word_embeddings": True,
                },
                "biases, explicit head_dim, whole heads rotated": {
                    "attention_bias": True,
                    "mlp_bias": True,
                    "mamba_proj_bias": True,
                    "head_dim": 8,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
                },
                "limited steps, no convolution bias": {
                    **NO_CACHE,
                    "time_step_limit": (0.5, 0.9),
                    "mamba_conv_bias": False,
                },
                "one layer, linear rope scaling, multi-query": {
                    "num_hidden_layers": 1,
                    "attn_layer_indices": [0],
                    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
                    "num_key_value_heads": 1,
                },
            },
        ),
        (
            "recurrent_gemma",
            "RecurrentGemmaForCausalLM",
            GRIFFIN,
            {
                "window shorter than the sequence": {},
                "window longer than the sequence, multi-query, explicit width": {
                    "attention_window_size": 64,
                    "num_key_value_heads": 1,
                    "lru_width": 48,
                    "conv1d_width": 2,
                    "num_hidden_layers": 4,
                },
                "another order, untied, biases, low softcap": {
                    "block_types": ["attention", "recurrent"],
                    "tie_word_embeddings": False,
                    "attention_bias": True,
                    "logits_soft_cap": 5.0,
                    "hidden_activation": "relu",
                    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
                },
                "one layer": {"num_hidden_layers": 1, "rms_norm_eps": 1e-3},
            },
        ),
        (
            "rwkv",
            "RwkvForCausalLM",
            RWKV,
            {
                "untied": {},
                "tied, other sizes": {
                    "tie_word_embeddings": True,
                    "attention_hidden_size": 32,
                    "intermediate_size": 40,
                },
                "another epsilon": {"layer_norm_epsilon": 1e-3, "num_hidden_layers": 2},
            },
        ),
        (
            "zamba2",
            "Zamba2ForCausalLM",
            ZAMBA2,
            {
                "one shared block, used twice": {},
                "two shared blocks, groups, no positions": {
                    "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid", "hybrid"],
                    "num_hidden_layers": 5,
                    "num_mem_blocks": 2,
                    "mamba_ngroups": 2,
                    "use_mem_rope": False,
                    "use_shared_attention_adapter": False,
                },
                "one layer, biases, multi-query, silu": {
                    "layers_block_type": ["hybrid"],
                    "num_hidden_layers": 1,
                    "add_bias_linear": True,
                    "num_key_value_heads": 1,
                    "use_shared_attention_adapter": False,
                    "hidden_act": "silu",
                },
            },
        ),
    ]
    for name, settings in cases.items()
}
