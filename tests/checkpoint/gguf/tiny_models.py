"""Tiny models of every architecture that GGUF files support."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.checkpoint.gguf import GGUFFormat, export_gguf
from regard.families import family
from tests.laws import build

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 512}  # whole blocks of K-quants
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
SCALES = {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.75, "logits_scaling": 2.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return LLAMA | {"rope_parameters": {"rope_type": kind, "rope_theta": 20000.0, **settings}}


MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": LLAMA | {"tie_word_embeddings": True},
    "llama, explicit head_dim": LLAMA | {"head_dim": 24},
    "llama, biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama, linear rope": rope("linear", factor=4.0),
    "llama, yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama, llama3 rope": rope("llama3", **LLAMA3),
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 128},  # transformers does not read head_dim from the file
    "granite": LLAMA | SCALES | {"model_type": "granite"},
    "olmo2": LLAMA | {"model_type": "olmo2"},
    "gpt2": GPT2,
    "gpt2, untied": GPT2 | {"tie_word_embeddings": False},
}


def build_tiny(config: dict[str, Any]) -> nn.Module:
    return build(family(config["model_type"]).spec(config), torch.float32)


def export_tiny(config: dict[str, Any], folder: Path, format: GGUFFormat = "f32") -> tuple[nn.Module, Path]:
    model = build_tiny(config)
    export_gguf(model, folder / "model.gguf", config["model_type"], format)
    return model, folder / "model.gguf"
