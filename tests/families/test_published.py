"""Published configs are read, written and their parameters counted, on the meta device.

`published.jsonl` has one model per line. Keys that published files contain and no family reads are added to each.
The counts are those of the classes of `transformers`, without parameters that are computed here (sinusoids), and with
buffers that are parameters here (biases of logits and of routers).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from regard.checkpoint.model_folder import count_parameters, unique_parameters
from regard.families import FAMILIES, FamilyError, family
from regard.models.base import build_on_meta
from regard.planning import groups, plan
from regard.weights.table import StoredTensor

PUBLISHED = [json.loads(line) for line in Path(__file__).with_name("published.jsonl").read_text().splitlines()]
UNUSED_KEYS = {
    "_name_or_path": "/home/me/model",
    "bos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.02,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
}


@pytest.mark.filterwarnings("ignore:switch_transformers. expert_capacity:UserWarning")
@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model["name"])
def test_a_published_config_has_the_published_parameter_count(model: dict[str, Any]) -> None:
    module = family(model["config"]["model_type"])
    spec = module.spec(UNUSED_KEYS | model["config"])
    assert count_parameters(spec) == model["parameters"]
    module.config(spec)  # raises FamilyError if it cannot express the spec


@pytest.mark.ledger("gqa.users")
@pytest.mark.parametrize(
    ("name", "heads", "kv_heads"),
    [
        ("gpt2", 12, 12),
        ("Llama-2-7b", 32, 32),
        ("Llama-2-70b", 64, 8),
        ("Llama-3-8B", 32, 8),
        ("Mistral-7B-v0.1", 32, 8),
        ("falcon-7b", 71, 1),
        ("falcon-40b", 128, 8),
    ],
)
def test_the_config_determines_the_number_of_key_heads(name: str, heads: int, kv_heads: int) -> None:
    (config,) = (model["config"] for model in PUBLISHED if model["name"] == name)
    spec = family(config["model_type"]).spec(config)
    assert {shape[:2] for shape in plan(spec).attention_shapes} == {(heads, kv_heads)}


LLAMA_PARTS = {"rope", "rmsnorm", "swiglu"}


@pytest.mark.parametrize(
    ("name", "parts", "bias"),
    [
        pytest.param("gpt2", {"learned", "layernorm", "feedforward"}, True, marks=pytest.mark.ledger("fam.gpt")),
        pytest.param("Llama-2-7b", LLAMA_PARTS, False, marks=pytest.mark.ledger("fam.llama", "pos.rope.users")),
        pytest.param("Llama-3.1-8B", LLAMA_PARTS | {"llama3"}, False, marks=pytest.mark.ledger("fam.llama")),
        pytest.param("Mistral-7B-v0.1", LLAMA_PARTS | {"window"}, False, marks=pytest.mark.ledger("pos.rope.users")),
        pytest.param("Qwen3-8B", LLAMA_PARTS, False, marks=pytest.mark.ledger("pos.rope.users", "fam.others")),
        pytest.param(
            "gemma-2-2b",
            {"rope", "rmsnorm", "gated", "window", "causal"},
            False,
            marks=pytest.mark.ledger("pos.rope.users", "fam.others"),
        ),
        pytest.param(
            "gpt-neox-20b",
            {"rope", "layernorm", "feedforward"},
            True,
            marks=pytest.mark.ledger("pos.rope.users", "fam.others"),
        ),
        pytest.param(
            "DeepSeek-V3",
            LLAMA_PARTS | {"latent_attention", "experts", "yarn"},
            False,
            marks=pytest.mark.ledger("pos.rope.users", "fam.others"),
        ),
        pytest.param("falcon-7b", {"rope", "feedforward"}, True, marks=pytest.mark.ledger("fam.others")),
        pytest.param(
            "rwkv-4-169m-pile", {"time_mixing", "channel_mixing"}, True, marks=pytest.mark.ledger("fam.others")
        ),
    ],
)
def test_a_published_config_is_read_into_the_parts_of_its_architecture(name, parts, bias) -> None:
    (config,) = (model["config"] for model in PUBLISHED if model["name"] == name)
    spec_json = family(config["model_type"]).spec(config).to_json()
    assert parts <= set(re.findall(r'"kind": ?"(\w+)"', spec_json))
    assert bool(re.search(r'"bias": ?true', spec_json)) == bias


@pytest.mark.ledger("fam.mistral")
def test_mistral_7b_has_a_window_of_4096_in_32_grouped_layers() -> None:
    """test_decoders compares windows as long as the sequence, one token shorter and one token longer."""
    (config,) = (model["config"] for model in PUBLISHED if model["name"] == "Mistral-7B-v0.1")
    planned = plan(family("mistral").spec(config))
    assert planned.attention_shapes == {(32, 8, 128): 32}
    assert groups(planned)["window_of_4096"]["layers"] == 32


def test_every_family_has_a_published_config() -> None:
    assert {model["config"]["model_type"] for model in PUBLISHED} == {*FAMILIES}


def test_the_error_names_an_unsupported_class() -> None:
    bert = next(model["config"] for model in PUBLISHED if model["name"] == "bert-base-uncased")
    with pytest.raises(FamilyError, match="architectures='BertForQuestionAnswering' is not supported"):
        family("bert").spec(bert | {"architectures": ["BertForQuestionAnswering"]})


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("gpt2", ("transformer.", "")),
        ("Qwen3-0.6B", ("model.", "")),  # as its embedding models are published
        ("Llama-3.2-1B", ("model.", "")),
        ("mamba-130m-hf", ("embeddings.", "embedding.")),
    ],
)
def test_alternative_tensor_names_of_published_files_are_read(name: str, replacement: tuple[str, str]) -> None:
    config = next(model["config"] for model in PUBLISHED if model["name"] == name)
    module = family(config["model_type"])
    spec = module.spec(config | {"num_hidden_layers": 1, "n_layer": 1})
    ours = unique_parameters(build_on_meta(spec))
    theirs = {key.replace(*replacement): tensor for key, tensor in module.table(spec).write(ours)}
    found = {key: StoredTensor("file", tuple(t.shape), "F32", lambda t=t: t) for key, t in theirs.items()}
    assert {key: tensor.shape for key, tensor in module.table(spec).read(found, ours)} == {
        key: tensor.shape for key, tensor in ours.items()
    }
