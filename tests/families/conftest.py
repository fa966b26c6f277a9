"""Tiny random models of `transformers`, saved once, and ours loaded from the same folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from regard.checkpoint import load
from regard.models.decoder import DecoderModule

VOCAB = 97
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # wide: attention far from uniform, greedy choices far from ties
}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}
NO_MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

CONFIGS = {
    "llama: grouped-query": ("llama", LLAMA | {"num_key_value_heads": 2}),
    "llama: tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "llama: one layer, multi-query": ("llama", LLAMA | {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    "llama: own head_dim": ("llama", LLAMA | {"head_dim": 20, "num_key_value_heads": 2}),
    "llama: biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama: another base and epsilon": (
        "llama",
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rms_norm_eps": 1e-3},
    ),
    "gpt2: tied": ("gpt2", GPT2),
    "gpt2: untied": ("gpt2", GPT2 | {"tie_word_embeddings": False}),
    "gpt2: one layer, one head": ("gpt2", GPT2 | {"n_layer": 1, "n_head": 1}),
    "gpt2: another width inside": ("gpt2", GPT2 | {"n_inner": 56, "activation_function": "gelu"}),
    "gpt2: relu, another epsilon": ("gpt2", GPT2 | {"activation_function": "relu", "layer_norm_epsilon": 1e-3}),
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
}


@dataclass
class Pair:
    """The same weights twice."""

    model_type: str
    folder: Path
    theirs: torch.nn.Module
    ours: DecoderModule


@pytest.fixture(scope="session", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    transformers.utils.logging.disable_progress_bar()
    model_type, settings = CONFIGS[request.param]
    config_class, model_class = CLASSES[model_type]
    folder = tmp_path_factory.mktemp(model_type)
    torch.manual_seed(0)
    theirs = model_class(config_class(**settings, **NO_MARKS)).eval()
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros: a wrong one would not be seen
            torch.nn.init.normal_(parameter, std=1.0 if name.endswith("weight") else 0.1)
    theirs.save_pretrained(folder)
    yield Pair(model_type, folder, theirs, load(folder))
