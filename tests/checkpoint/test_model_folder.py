"""Model folders: a loaded model equals the saved one, from one file or from shards, ours or of Hugging Face."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.checkpoint import CheckpointError, export, load, save, weight_files
from regard.checkpoint.model_folder import count_parameters
from regard.families import family
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.weights.table import WeightsError
from tests.laws import MODELS, assert_equal_weights, build, error, random_ids

LLAMA = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture
def model() -> DecoderModule:
    return build(family("llama").spec(LLAMA), torch.float32)


@pytest.fixture
def folder(model: DecoderModule, tmp_path: Path) -> Path:
    """A Hugging Face folder with a single weight file."""
    export(model, tmp_path / "model", "llama")
    return tmp_path / "model"


def split_into_shards(folder: Path) -> None:
    """Replace the single file of a folder by two shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + n % 2}-of-2.safetensors" for n, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_equals_the_saved_one(name: str, tmp_path: Path) -> None:
    saved = build(MODELS[name], torch.float32)
    save(saved, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.spec == saved.spec
    assert not loaded.training
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in saved.spec.build().parameters()]
    assert (loaded.head.weight is loaded.embedding.weight) == saved.spec.tied
    assert_equal_weights(loaded, saved)
    with torch.no_grad():  # with gradients of a bias, attention uses another kernel
        assert error(loaded(random_ids(2, 9)), saved(random_ids(2, 9))) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_without_building_all_layers(name: str) -> None:
    spec = dataclasses.replace(MODELS[name], layers=(*MODELS[name].layers, Repeat(MODELS[name].blocks, 3)))
    assert count_parameters(spec) == sum(p.numel() for p in spec.build().parameters())


def test_a_saved_config_holds_the_spec(model: DecoderModule, tmp_path: Path) -> None:
    save(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == "regard"
    assert Decoder.from_dict(config["spec"]) == model.spec


def test_the_tokenizer_is_saved_and_its_ids_are_exported(model: DecoderModule, tmp_path: Path) -> None:
    class Tokenizer:
        bos, eos, pad = None, 3, 4

        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    save(model, tmp_path / "saved", Tokenizer())
    export(model, tmp_path / "theirs", "llama", Tokenizer())
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (None, 3, 4)
    assert config["dtype"] == "float32"


def test_a_failed_save_leaves_the_old_folder(model: DecoderModule, tmp_path: Path) -> None:
    class FailingTokenizer:
        def save(self, folder: Path) -> None:
            raise OSError("disk full")

    save(model, tmp_path / "saved")
    with pytest.raises(OSError, match="disk full"):
        save(model, tmp_path / "saved", FailingTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    load(tmp_path / "saved")


def test_a_model_that_differs_from_its_spec_is_not_saved(model: DecoderModule, tmp_path: Path) -> None:
    model.stack.blocks[0].adapter = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"stack\.blocks\.0\.adapter\.bias is in the model only; build"):
        save(model, tmp_path / "saved")
    with pytest.raises(WeightsError, match=r"stack\.blocks\.0\.adapter\.bias has no link"):
        export(model, tmp_path / "theirs", "llama")
    assert not list(tmp_path.iterdir())


def test_weights_have_the_requested_dtype_or_at_least_float32(model: DecoderModule, tmp_path: Path) -> None:
    save(model.to(torch.bfloat16), tmp_path / "half")
    assert load(tmp_path / "half").embedding.weight.dtype == torch.float32
    assert load(tmp_path / "half", dtype=torch.bfloat16).embedding.weight.dtype == torch.bfloat16
    save(model.double(), tmp_path / "double")
    assert load(tmp_path / "double").embedding.weight.dtype == torch.float64


def test_weights_do_not_depend_on_the_file_after_loading(folder: Path) -> None:
    """Truncating a mapped file would kill the process."""
    loaded = load(folder)
    expected = loaded(random_ids(1, 5))
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(loaded(random_ids(1, 5)), expected)


def test_loading_does_not_import_sympy(folder: Path, tmp_path: Path) -> None:
    """Neither building on the meta device nor splitting tensors imports sympy, a dependency of torch's compiler."""
    gpt2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    export(family("gpt2").spec(gpt2).build(0), tmp_path / "gpt2", "gpt2")
    code = "import sys; from regard.checkpoint import load; load(sys.argv[1]); load(sys.argv[2]); "
    command = [sys.executable, "-c", code + "sys.exit('sympy' in sys.modules)", str(folder), str(tmp_path / "gpt2")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": "src"})


@pytest.mark.slow
def test_peak_memory_is_one_copy_of_the_model(tmp_path: Path) -> None:
    sizes = LLAMA | {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    export(family("llama").spec(sizes).build(0), tmp_path / "big", "llama")
    code = """
import resource, sys
from regard.checkpoint import load
import regard.families.llama
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load(sys.argv[1])
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
sys.exit(peak > 1.25 * sum(p.nbytes for p in model.parameters()))
"""
    folder = str(tmp_path / "big")
    subprocess.run([sys.executable, "-c", code, folder], check=True, env=os.environ | {"PYTHONPATH": "src"})


def test_shards_are_loaded_like_a_single_file(folder: Path) -> None:
    expected = load(folder)
    split_into_shards(folder)
    loaded = load(folder)
    assert_equal_weights(loaded, expected)
    assert error(loaded(random_ids(1, 5)), expected(random_ids(1, 5))) <= 1e-5


@pytest.mark.parametrize("limit", [2000, 6000])
def test_large_models_are_written_as_shards(folder: Path, tmp_path: Path, monkeypatch, limit: int) -> None:
    """One tensor exceeds the smaller limit and is stored in a separate file."""
    model = load(folder)
    monkeypatch.setattr(weight_files, "MAX_SHARD_BYTES", limit)
    save(model, tmp_path / "ours")
    export(model, tmp_path / "theirs", "llama")
    for out in (tmp_path / "ours", tmp_path / "theirs"):
        loaded = load(out)
        assert_equal_weights(loaded, model)
        assert error(loaded(random_ids(1, 5)), model(random_ids(1, 5))) <= 1e-5
        index = json.loads((out / "model.safetensors.index.json").read_text())
        shards = {name: load_file(out / name) for name in set(index["weight_map"].values())}
        assert {name: {n for n, p in index["weight_map"].items() if p == name} for name in shards} == {
            name: set(tensors) for name, tensors in shards.items()
        }
        sizes = [sum(t.nbytes for t in tensors.values()) for tensors in shards.values()]
        assert index["metadata"]["total_size"] == sum(sizes) and len(shards) > 2
        assert all(size <= limit or len(tensors) == 1 for size, tensors in zip(sizes, shards.values(), strict=True))
        assert not (out / "model.safetensors").exists()


def test_transformers_reads_the_shards(folder: Path, tmp_path: Path, monkeypatch) -> None:
    from transformers import LlamaForCausalLM

    model = load(folder)
    monkeypatch.setattr(weight_files, "MAX_SHARD_BYTES", 6000)
    export(model, tmp_path / "theirs", "llama")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    assert (theirs(random_ids(1, 5)).logits - model(random_ids(1, 5))).abs().max() < 1e-5


def test_progress_is_reported_after_every_tensor(folder: Path) -> None:
    reports: list[tuple[int, int]] = []
    model = load(folder, progress=lambda *counts: reports.append(counts))
    total = sum(p.numel() for p in model.parameters())
    assert reports[-1] == (total, total) and reports == sorted(reports) and len(reports) == 21


def test_a_model_loaded_in_inference_mode_can_be_trained(folder: Path) -> None:
    with torch.inference_mode():
        model = load(folder, dtype=torch.float64)
    model(random_ids(1, 5)).sum().backward()
    assert model.embedding.weight.grad is not None


def test_symbolic_links_are_followed(folder: Path, tmp_path: Path) -> None:
    """The cache of the Hugging Face hub consists of symbolic links."""
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    load(folder)
    (tmp_path / "blob").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load(folder)


def test_published_gpt2_files_are_loaded(tmp_path: Path) -> None:
    """Their tensor names have no prefix, and they contain attention masks."""
    spec = {"model_type": "gpt2", "vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    original = build(family("gpt2").spec(spec), torch.float32)
    export(original, tmp_path / "gpt2", "gpt2")
    theirs = load_file(tmp_path / "gpt2" / "model.safetensors")
    published = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    published |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    save_file(published, tmp_path / "gpt2" / "model.safetensors")
    loaded = load(tmp_path / "gpt2")
    assert_equal_weights(loaded, original)
    assert error(loaded(random_ids(1, 7)), original(random_ids(1, 7))) <= 1e-5
