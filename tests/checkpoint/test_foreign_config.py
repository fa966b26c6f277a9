"""A quantization method that is not read is refused; code that a config names is never run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.checkpoint import CheckpointError, export, load
from regard.families import FamilyError, family
from tests.checkpoint.test_model_folder import LLAMA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export(family("llama").spec(LLAMA).build(0), tmp_path / "theirs", "llama")
    return tmp_path / "theirs"


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_code_named_in_a_config_is_ignored_with_one_warning(folder: Path) -> None:
    expected = load(folder).state_dict()
    change_config(folder, auto_map={"AutoModel": "modeling.Model"})
    with pytest.warns(
        UserWarning, match="auto_map in config.json names is never run; .* a standard llama model"
    ) as warned:
        found = load(folder).state_dict()
    assert len(warned) == 1
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_code_of_an_unknown_family_is_not_run(folder: Path) -> None:
    change_config(folder, auto_map={"AutoModel": "modeling.Model"}, model_type="new_model")
    with pytest.raises(FamilyError, match="there is no family 'new_model'; choose one of"):
        load(folder)


@pytest.mark.parametrize("method", ["hqq", "mxfp4", "torchao"])
def test_other_quantized_weights_are_refused_with_the_remedy(method: str, folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(CheckpointError, match=rf"'{method}', which is not read.*gptq, awq.*model.dequantize\(\)"):
        load(folder)
