"""RoPE's settings may be in several keys of a config; with each, the loaded model equals that of `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard.checkpoint import load
from regard.families import FamilyError
from tests.families.cases import VOCAB, classic, decoders, encoders, experts, recurrent
from tests.families.pairs import LIMIT, make_pair
from tests.laws import error

CASES = classic.CASES | decoders.CASES | experts.CASES | recurrent.CASES | encoders.CASES
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 3.0}
ROTARY_FRACTIONS = {"GPTNeoXForCausalLM": 0.25, "BambaForCausalLM": 0.5, "PhiForCausalLM": 0.5}


def first_case_of(model: str) -> tuple[str, dict[str, Any]]:
    return next(case for case in CASES.values() if case[0] == model)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(5))


def change_config(folder: Path, **changes: Any) -> None:
    """Change settings of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@torch.no_grad()
def load_and_compare(model: str, folder: Path, **changes: Any) -> bool:
    """Load the changed folder here and in transformers, and compare; return whether the change had an effect."""
    pair, ids = make_pair(first_case_of(model), folder), tokens(2, 40)
    change_config(folder, **changes)
    theirs = getattr(transformers, model).from_pretrained(folder).eval()
    expected, unchanged = (
        out.logits if "logits" in out else out.last_hidden_state for out in (theirs(ids), pair.theirs(ids))
    )
    assert error(load(folder)(ids), expected) <= LIMIT
    return error(expected, unchanged) > 100 * LIMIT


@pytest.mark.parametrize(
    "model",
    [
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "GPTNeoXForCausalLM",
        "PhiForCausalLM",
        "FalconForCausalLM",
        "GptOssForCausalLM",
        "Gemma3ForCausalLM",
        "ModernBertModel",
    ],
)
@pytest.mark.parametrize("scaling", [YARN, LINEAR], ids=lambda scaling: scaling["rope_type"])
def test_rope_scaling_replaces_rope_parameters(model: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    base = {} if model in ("Gemma3ForCausalLM", "ModernBertModel") else {"rope_theta": 555.0}
    assert load_and_compare(model, tmp_path, rope_scaling=scaling | base | rotary_fraction(model))


def rotary_fraction(model: str) -> dict[str, float]:
    return {"partial_rotary_factor": ROTARY_FRACTIONS[model]} if model in ROTARY_FRACTIONS else {}


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 555.0), ("partial_rotary_factor", 1.0)])
def test_settings_that_rope_scaling_would_discard_are_refused(key: str, value: float, tmp_path: Path) -> None:
    """transformers uses the default of its class instead, with which the model was not trained."""
    make_pair(first_case_of("PhiForCausalLM"), tmp_path)
    change_config(tmp_path, rope_parameters={"rope_type": "default", key: value}, rope_scaling=YARN)
    with pytest.raises(FamilyError, match=f"rope_parameters: {key}={value} .* add {key} to rope_scaling"):
        load(tmp_path)
    change_config(tmp_path, **{key: value})
    load(tmp_path)


@pytest.mark.parametrize("model", [*ROTARY_FRACTIONS])
@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_settings_outside_rope_parameters_are_read_as_in_transformers(model: str, key: str, tmp_path: Path) -> None:
    """GPT-NeoX ignores both keys, Bamba the second one; the others read them."""
    outside_values = {"rope_theta": 555.0, "partial_rotary_factor": 1.0}
    changed = load_and_compare(model, tmp_path, rope_parameters=None, **{key: outside_values[key]})
    ignored = {"GPTNeoXForCausalLM": [*outside_values], "BambaForCausalLM": ["partial_rotary_factor"]}
    assert changed == (key not in ignored.get(model, []))


@pytest.mark.parametrize("model", [*ROTARY_FRACTIONS])
def test_settings_inside_rope_parameters_are_read(model: str, tmp_path: Path) -> None:
    inside = {"rope_type": "default", "rope_theta": 555.0, "partial_rotary_factor": 1.0}
    assert load_and_compare(model, tmp_path, rope_parameters=inside)
