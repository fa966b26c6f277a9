"""Decoders with experts: Mixtral, Qwen, OLMoE, GPT-OSS with sinks, DeepSeek with latent attention."""

from tests.families.cases import LARGE_INIT, VOCAB, Cases

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **LARGE_INIT,
}
ONE_LAYER = {"num_hidden_layers": 1, "num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}
MIXTRAL = BASE | {"num_local_experts": 5}
QWEN = BASE | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2 = QWEN | {"shared_expert_intermediate_size": 20}
OLMOE = BASE | {"num_experts": 6, "num_experts_per_tok": 3}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GPT_OSS = BASE | {
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "swiglu_limit": 2.0,  # low enough to clamp some values
    "rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False},
}
DEEPSEEK = BASE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
YARN_MSCALE = {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}
V3 = DEEPSEEK | {"n_group": 4, "topk_group": 2}

CASES: Cases = {
    f"{family}: {name}": (model, settings)
    for family, model, cases in (
        (
            "mixtral",
            "MixtralForCausalLM",
            {
                "grouped-query": MIXTRAL,
                "window, explicit head_dim": MIXTRAL | {"sliding_window": 6, "head_dim": 10},
                "one layer, multi-query, top one, tied": MIXTRAL | ONE_LAYER | TIED | {"num_experts_per_tok": 1},
                "all experts, window longer than the sequence": MIXTRAL
                | {"num_experts_per_tok": 5, "sliding_window": 50},
            },
        ),
        (
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            {
                "one dense layer": QWEN2 | {"mlp_only_layers": [1]},
                "windows, every other dense, no biases": QWEN2
                | {"use_sliding_window": True, "sliding_window": 6, "decoder_sparse_step": 2, "qkv_bias": False}
                | {"num_hidden_layers": 4, "max_window_layers": 2},
                "one layer, multi-query, tied, renormalized": QWEN2 | ONE_LAYER | TIED | {"norm_topk_prob": True},
                "windows from a list": QWEN2
                | {"use_sliding_window": True, "sliding_window": 50, "num_hidden_layers": 2}
                | {"layer_types": ["full_attention", "sliding_attention"]},
            },
        ),
        (
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {
                "explicit head_dim, renormalized": QWEN | {"head_dim": 20, "norm_topk_prob": True},
                "window, first layer dense, biases": QWEN
                | {"use_sliding_window": True, "sliding_window": 6, "mlp_only_layers": [0], "attention_bias": True},
                "one layer, multi-query, tied": QWEN | ONE_LAYER | TIED,
            },
        ),
        (
            "olmoe",
            "OlmoeForCausalLM",
            {
                "clipped": OLMOE | {"clip_qkv": 0.9},
                "not clipped, biases, renormalized": OLMOE | {"attention_bias": True, "norm_topk_prob": True},
                "one layer, multi-query, tied": OLMOE | ONE_LAYER | TIED,
            },
        ),
        (
            "gpt_oss",
            "GptOssForCausalLM",
            {
                "as published": GPT_OSS,
                "no biases, window longer than the sequence, tied": GPT_OSS
                | TIED
                | {"attention_bias": False, "sliding_window": 50, "num_local_experts": 3, "swiglu_limit": 7.0},
                "one layer, multi-query, full, top one": GPT_OSS
                | ONE_LAYER
                | {"layer_types": ["full_attention"], "num_experts_per_tok": 1},
            },
        ),
        (
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            {
                "greedy, yarn with mscale": DEEPSEEK | YARN_MSCALE,
                "grouped routing, biases": DEEPSEEK
                | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
                | {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
                "one layer, one head, no query rank, tied": DEEPSEEK
                | ONE_LAYER
                | TIED
                | {"num_attention_heads": 1, "q_lora_rank": None, "first_k_dense_replace": 0, "v_head_dim": 5},
            },
        ),
        (
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            {
                "grouped routing": V3,
                "half layout, yarn, biases": V3
                | YARN_MSCALE
                | {"rope_interleave": False, "attention_bias": True, "n_shared_experts": 2, "rms_norm_eps": 1e-3},
                "one layer, one head, no query rank, one group, not renormalized, tied": V3
                | ONE_LAYER
                | TIED
                | {"num_attention_heads": 1, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
                | {"norm_topk_prob": False, "first_k_dense_replace": 0},
            },
        ),
    )
    for name, settings in cases.items()
}
