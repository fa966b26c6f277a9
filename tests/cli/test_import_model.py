"""`regard import` and `regard export`: dtype, generation config, family."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from regard.checkpoint import export, load, save
from regard.families import family
from regard.models.heads import Pooled
from tests.checkpoint.mutations import configs
from tests.checkpoint.test_model_folder import LLAMA
from tests.cli.conftest import regard

GENERATION = '{"temperature": 0.6,   "eos_token_id": [1, 2]}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export(family("llama").spec(LLAMA).build(0).bfloat16(), tmp_path / "theirs", "llama")
    (tmp_path / "theirs" / "generation_config.json").write_text(GENERATION)
    return tmp_path / "theirs"


def dtype_of(folder: Path) -> str:
    with safe_open(folder / "model.safetensors", "pt") as opened:
        return opened.get_slice(next(iter(opened.keys()))).get_dtype()


@pytest.mark.parametrize(("options", "stored"), [((), "F32"), (("--dtype", "bfloat16", "--device", "cpu"), "BF16")])
def test_the_dtype_option_sets_the_stored_dtype(
    folder: Path, tmp_path: Path, options: tuple[str, ...], stored: str
) -> None:
    result = regard("import", folder, tmp_path / "ours", *options)
    assert result.exit_code == 0 and "without a tokenizer" in result.output
    assert dtype_of(tmp_path / "ours") == stored


def test_the_generation_config_is_kept_by_import_and_export(folder: Path, tmp_path: Path) -> None:
    assert regard("import", folder, tmp_path / "ours").exit_code == 0
    result = regard("export", tmp_path / "ours", tmp_path / "back")
    assert result.exit_code == 0 and "is a llama model for transformers" in result.output.replace("\n", "")
    for out in (tmp_path / "ours", tmp_path / "back"):
        assert (out / "generation_config.json").read_text() == GENERATION
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    imported, exported = load(tmp_path / "ours"), load(tmp_path / "back")
    assert all(torch.equal(a, b) for a, b in zip(imported.parameters(), exported.parameters(), strict=True))


def test_a_broken_generation_config_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text("[")
    result = regard("import", folder, tmp_path / "ours")
    assert "generation_config.json is not valid JSON" in str(result.exception) and not (tmp_path / "ours").exists()


def test_any_kind_of_model_is_exported_as_the_family_that_fits(tmp_path: Path) -> None:
    export(family("bert").spec(dict(configs())["bert"]).build(0), tmp_path / "theirs", "bert")
    imported = regard("import", tmp_path / "theirs", tmp_path / "ours")
    assert imported.exit_code == 0 and "generate" not in imported.output  # an encoder does not generate text
    assert regard("export", tmp_path / "ours", tmp_path / "back").exit_code == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "bert"
    refused = regard("export", tmp_path / "ours", tmp_path / "no", "--family", "llama")
    assert "a llama model is a decoder, and this is an encoder" in str(refused.exception)


@pytest.mark.parametrize("model_type", ["phi3", "distilbert"])
def test_an_export_has_the_family_of_the_source(model_type: str, tmp_path: Path) -> None:
    """The tiny configs of these families are also valid models of Llama and BERT."""
    export(family(model_type).spec(dict(configs())[model_type]).build(0), tmp_path / "theirs", model_type)
    assert regard("import", tmp_path / "theirs", tmp_path / "ours").exit_code == 0
    for source, out in (("theirs", "direct"), ("ours", "imported")):
        result = regard("export", tmp_path / source, tmp_path / out)
        assert result.exit_code == 0, result.exception
        assert json.loads((tmp_path / out / "config.json").read_text())["model_type"] == model_type


def test_a_sentence_encoder_is_exported(tmp_path: Path) -> None:
    spec = replace(family("bert").spec(dict(configs())["bert"]), head=Pooled("mean"))
    save(spec.build(0), tmp_path / "ours")
    result = regard("export", tmp_path / "ours", tmp_path / "out")
    assert result.exit_code == 0 and "is a bert model for transformers" in result.output.replace("\n", "")
    assert load(tmp_path / "out").spec == spec
