"""Encoder-decoders: T5 and its variations, BART and its variations."""

import sys
from typing import Any

from tests.families.cases import VOCAB, Cases

T5 = {"vocab_size": VOCAB, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}
FEW_BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
BART = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "max_position_embeddings": 64,
    "encoder_layers": 2,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 56,
    "decoder_attention_heads": 3,
    "init_std": 0.2,
    "forced_eos_token_id": None,
}
WHISPER = {name: value for name, value in BART.items() if not name.startswith(("max", "forced"))} | {
    "num_mel_bins": 10,
    "max_source_positions": 24,
    "max_target_positions": 48,
    "begin_suppress_tokens": None,
}
LED = {name: value for name, value in BART.items() if not name.startswith(("max", "forced"))} | {
    "attention_window": 6,
    "pad_token_id": 0,
    "max_encoder_position_embeddings": 40,
    "max_decoder_position_embeddings": 64,
}
SWITCH = T5 | {
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_experts": 4,
    "expert_capacity": sys.maxsize,  # no token is dropped
}


def make_cases(model: str, prefix: str, base: dict[str, Any], **changes: dict[str, Any]) -> Cases:
    return {f"{prefix}: {name.replace('_', ' ')}": (model, base | change) for name, change in changes.items()}


CASES: Cases = (
    make_cases(
        "T5ForConditionalGeneration",
        "t5",
        T5,
        first_version={},
        gated_gelu_unscaled={"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        explicit_head_dim_few_buckets=FEW_BUCKETS | {"d_kv": 20, "num_layers": 3, "num_decoder_layers": 2},
        one_layer_one_head_silu={"num_layers": 1, "num_heads": 1, "feed_forward_proj": "gated-silu"},
        gelu_another_epsilon={"feed_forward_proj": "gelu", "layer_norm_epsilon": 1e-3},
    )
    | make_cases(
        "MT5ForConditionalGeneration",
        "mt5",
        T5,
        gated_gelu={},
        explicit_head_dim_fewer_layers={"d_kv": 5, "num_layers": 3, "num_decoder_layers": 1},
        one_layer_relu=FEW_BUCKETS | {"num_layers": 1, "feed_forward_proj": "relu"},
    )
    | make_cases(
        "SwitchTransformersForConditionalGeneration",
        "switch transformers",
        SWITCH,
        experts_in_every_second_layer={},
        all_experts_router_bias={
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "router_bias": True,
            "dense_act_fn": "gelu",
        },
        untied_last_layer_dense=FEW_BUCKETS
        | {"num_layers": 3, "num_decoder_layers": 1, "tie_word_embeddings": False, "d_kv": 7},
        no_experts={"num_layers": 3, "encoder_sparse_step": 0, "decoder_sparse_step": 0},
    )
    | make_cases(
        "BartForConditionalGeneration",
        "bart",
        BART,
        tied={},
        untied_scaled={"tie_word_embeddings": False, "scale_embedding": True},
        one_layer_one_head_relu={
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 1,
            "decoder_attention_heads": 1,
            "activation_function": "relu",
        },
    )
    | make_cases(
        "MarianMTModel",
        "marian",
        BART | {"decoder_start_token_id": 1},
        shared_embedding_scaled={"scale_embedding": True},
        two_embeddings={"share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB + 6},
        untied_swish={"tie_word_embeddings": False, "activation_function": "swish"},
        odd_width={"d_model": 45, "encoder_attention_heads": 5, "encoder_layers": 3, "decoder_layers": 1},
    )
    | make_cases(
        "PegasusForConditionalGeneration",
        "pegasus",
        BART,
        scaled={"scale_embedding": True},
        untied_relu={"tie_word_embeddings": False, "activation_function": "relu"},
        one_layer_odd_width={"d_model": 33, "encoder_attention_heads": 3, "encoder_layers": 1, "decoder_layers": 1},
    )
    | make_cases(
        "LEDForConditionalGeneration",
        "led",
        LED,
        window_shorter_than_the_sequence={},
        window_longer_than_the_sequence={"attention_window": 40, "activation_function": "relu"},
        one_window_per_layer_untied={"attention_window": [4, 8, 8], "encoder_layers": 3, "tie_word_embeddings": False},
        one_layer_one_head={"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1},
    )
    | make_cases(
        "WhisperForConditionalGeneration",
        "whisper",
        WHISPER,
        tied={},
        untied={"tie_word_embeddings": False, "encoder_layers": 3},
        one_layer_one_head_relu={
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 1,
            "activation_function": "relu",
            "num_mel_bins": 3,
        },
    )
)
