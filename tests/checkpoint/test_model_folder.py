"""Model folders: a loaded model equals the saved one, and an inconsistent folder is refused before memory is used."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.checkpoint import CheckpointError, export, load, save, weight_files
from regard.checkpoint.model_folder import count_parameters
from regard.families import FamilyError, family
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.spec import SpecError
from regard.weights.table import WeightsError
from tests.laws import MODELS, build, random_ids

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


def edit(file: Path, change: Callable[[dict], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


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
    with torch.no_grad():  # with gradients of a bias, attention uses another kernel
        assert torch.equal(loaded(random_ids(2, 9)), saved(random_ids(2, 9)))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_without_building_all_layers(name: str) -> None:
    spec = dataclasses.replace(MODELS[name], layers=(*MODELS[name].layers, Repeat(MODELS[name].blocks, 3)))
    assert count_parameters(spec) == sum(p.numel() for p in spec.build().parameters())


def test_a_saved_config_holds_the_spec(model: DecoderModule, tmp_path: Path) -> None:
    save(model, tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["model_type"] == "regard"
    assert Decoder.from_dict(config["spec"]) == model.spec


def test_the_tokenizer_is_saved_and_its_ids_are_exported(model: DecoderModule, tmp_path: Path) -> None:
    class Tokenizer:
        bos, eos, pad = None, 3, 4

        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    save(model, tmp_path / "own", Tokenizer())
    export(model, tmp_path / "theirs", "llama", Tokenizer())
    assert (tmp_path / "own" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (None, 3, 4)
    assert config["dtype"] == "float32"


def test_a_failed_save_leaves_the_old_folder(model: DecoderModule, tmp_path: Path) -> None:
    class Broken:
        def save(self, folder: Path) -> None:
            raise OSError("disk full")

    save(model, tmp_path / "own")
    with pytest.raises(OSError, match="disk full"):
        save(model, tmp_path / "own", Broken())
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    load(tmp_path / "own")


def test_a_model_that_differs_from_its_spec_is_not_saved(model: DecoderModule, tmp_path: Path) -> None:
    model.stack.blocks[0].adapter = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"stack\.blocks\.0\.adapter\.bias is in the model only; build"):
        save(model, tmp_path / "own")
    with pytest.raises(WeightsError, match=r"stack\.blocks\.0\.adapter\.bias has no link"):
        export(model, tmp_path / "theirs", "llama")
    assert not list(tmp_path.iterdir())


def test_the_dtype_in_memory_follows_the_stored_and_requested_ones(model: DecoderModule, tmp_path: Path) -> None:
    save(model.to(torch.bfloat16), tmp_path / "half")
    assert load(tmp_path / "half").embedding.weight.dtype == torch.float32
    assert load(tmp_path / "half", dtype=torch.bfloat16).embedding.weight.dtype == torch.bfloat16
    save(model.double(), tmp_path / "double")
    assert load(tmp_path / "double").embedding.weight.dtype == torch.float64


def test_weights_do_not_depend_on_the_file_after_loading(folder: Path) -> None:
    """If they did, truncating the file would kill the process."""
    loaded = load(folder)
    expected = loaded(random_ids(1, 5))
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(loaded(random_ids(1, 5)), expected)


def test_loading_does_not_import_the_compiler(folder: Path, tmp_path: Path) -> None:
    """Neither building on the meta device nor a table that splits tensors imports sympy."""
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
    expected = load(folder)(random_ids(1, 5))
    split_into_shards(folder)
    assert torch.equal(load(folder)(random_ids(1, 5)), expected)


@pytest.mark.parametrize("limit", [2000, 6000])
def test_large_models_are_written_as_shards(folder: Path, tmp_path: Path, monkeypatch, limit: int) -> None:
    """One tensor exceeds the smaller limit and gets a file of its own."""
    model = load(folder)
    expected = model(random_ids(1, 5))
    monkeypatch.setattr(weight_files, "MAX_SHARD_BYTES", limit)
    save(model, tmp_path / "ours")
    export(model, tmp_path / "theirs", "llama")
    for out in (tmp_path / "ours", tmp_path / "theirs"):
        assert torch.equal(load(out)(random_ids(1, 5)), expected)
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
    transformers = pytest.importorskip("transformers")
    model = load(folder)
    monkeypatch.setattr(weight_files, "MAX_SHARD_BYTES", 6000)
    export(model, tmp_path / "theirs", "llama")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
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
    """The cache of the Hugging Face hub consists of them."""
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    load(folder)
    (tmp_path / "blob").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load(folder)


def rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def config(**values: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda config: config.update(values))


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, change)


def truncate(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        split_into_shards(folder)
        edit(folder / "model.safetensors.index.json", change)

    return damage


def shard_named(name: str) -> Callable[[Path], None]:
    return index(lambda index: index["weight_map"].update({"lm_head.weight": name}))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def deeply_nested_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "regard", "spec": ' + '{"kind":' * 50_000 + "}" * 50_000 + "}")


def deeply_nested_spec(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    spec = '{"kind": "repeat", "blocks": [' * 400 + "]}" * 400
    (folder / "config.json").write_text('{"model_type": "regard", "spec": ' + spec + "}")


def header(change: Callable[[dict], object], length: int | None = None) -> Callable[[Path], None]:
    """Change the header of the weights, and optionally declare a wrong length."""

    def damage(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(content[:8], "little")
        values = json.loads(content[8 : 8 + size])
        change(values)
        changed = json.dumps(values).encode()
        declared = (len(changed) if length is None else length).to_bytes(8, "little")
        (folder / "model.safetensors").write_bytes(declared + changed + content[8 + size :])

    return damage


def entry(**values: object) -> Callable[[Path], None]:
    return header(lambda header: header[NORM].update(values))


def duplicate_name(folder: Path) -> None:
    """A name that occurs twice in the header, which two readers may interpret differently."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    changed = content[8 : 8 + size].replace(b"{", b'{"' + NORM.encode() + b'":{},', 1)
    (folder / "model.safetensors").write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])


def fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


NORM = "model.norm.weight"
INVALID = {
    "truncated weights": (truncate("model.safetensors", 0.6), "model.safetensors is damaged"),
    "empty weights": (truncate("model.safetensors", 0), "model.safetensors is damaged"),
    "truncated config": (truncate("config.json", 0.5), "config.json is not valid JSON"),
    "deep config": (deeply_nested_config, "not valid JSON"),
    "nested spec": (deeply_nested_spec, "nested"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "a list for a config": (lambda folder: (folder / "config.json").write_text("[]"), "holds list, expected an object"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds neither"),
    "a pickle": (pickled, "pytorch_model.bin, a pickle that can run code.*save_pretrained"),
    "a header longer than the file": (header(len, 1 << 40), "at most .* bytes, found 1099511627776"),
    "a header of 2^64 bytes": (header(len, (1 << 64) - 1), "its header should have at most"),
    "a truncated header": (header(len, 40), "header is not valid JSON"),
    "a duplicate name": (duplicate_name, "a name occurs twice"),
    "a gap": (entry(data_offsets=[8, 72]), "should start at byte"),
    "negative offsets": (entry(data_offsets=[-64, 0]), "should have a dtype, a shape and data_offsets, found"),
    "an end before its start": (entry(data_offsets=[64, 0]), "should have a dtype, a shape and data_offsets"),
    "fewer bytes than its shape": (entry(shape=[17]), r"norm.weight \(17,\) in F32 should have 68 bytes, found 64"),
    "another dtype than its bytes": (entry(dtype="F16"), r"norm.weight \(16,\) in F16 should have 32 bytes, found 64"),
    "a shape of 2^122": (entry(shape=[1 << 61, 1 << 61]), "in F32 should have 2126.* bytes, found 64"),
    "a hundred dimensions": (entry(shape=[1] * 100), "should have a dtype, a shape and data_offsets"),
    "no dtype": (entry(dtype=None), "should have a dtype, a shape and data_offsets"),
    "a tensor called nan": (header(lambda h: h.update(nan=h.pop(NORM))), r"norm.weight \(16,\) is missing"),
    "a name of 9999 characters": (header(lambda h: h.update({"x" * 9999: h.pop(NORM)})), "at most 500 characters"),
    "a named pipe": (fifo, "holds neither"),
    "a large config": (lambda folder: (folder / "config.json").write_text(" " * (5 << 20)), "files of more than"),
    "missing tensor": (tensors(lambda t: t.pop(NORM)), r"model\.norm\.weight \(16,\) is missing"),
    "extra tensor": (tensors(lambda t: t.update(extra=torch.ones(2))), r"extra \(2,\) belongs to no part"),
    "wrong shape": (tensors(lambda t: t.update({NORM: torch.ones(17)})), r"should be \(16,\).* found \(17,\)"),
    "integers": (tensors(lambda t: t.update({NORM: torch.ones(16).int()})), "stored as I32"),
    "wider than the files": (config(hidden_size=1 << 20), "the config has .* parameters, but the files have"),
    "deeper than the files": (config(num_hidden_layers=10**4), "the config has .* parameters, but the files have"),
    "deeper than any model": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be at most 10000"),
    "one layer too many": (config(num_hidden_layers=3), r"model\.layers\.2\..* is missing"),
    "one layer too few": (config(num_hidden_layers=1), r"model\.layers\.1\..* belongs to no part"),
    "past 64 bits": (config(hidden_size=1 << 62, intermediate_size=1 << 62), "too large"),
    "a vocabulary of 10^30": (config(vocab_size=10**30), "too large"),
    "a billion heads": (config(num_attention_heads=10**9, num_key_value_heads=7, head_dim=2), "heads=1000000000"),
    "unknown family": (config(model_type="lama"), "did you mean 'llama'"),
    "a family without a similar name": (config(model_type="deberta"), "no family 'deberta'; choose one of bamba, bart"),
    "a family that is not a string": (config(model_type=["llama"]), "there is no family"),
    "a shard in the parent folder": (shard_named("../model.safetensors"), "must be the name of a .safetensors file"),
    "a shard with an absolute path": (shard_named("/etc/passwd"), "must be the name of a .safetensors file"),
    "a shard of another type": (shard_named("model.bin"), "must be the name of a .safetensors file"),
    "a missing shard": (shard_named("model-3.safetensors"), "model-3.safetensors is missing from the folder"),
    "a shard that is not a string": (shard_named(3), "weight_map must map every tensor"),
    "an empty index": (index(lambda index: index.update(weight_map={})), "weight_map must map"),
    "an index without map": (index(lambda index: index.pop("weight_map")), "weight_map must map"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_an_invalid_folder_is_refused(fault: str, folder: Path) -> None:
    damage, message = INVALID[fault]
    damage(folder)
    with pytest.raises((CheckpointError, WeightsError, FamilyError, SpecError), match=message):
        load(folder)


def test_a_flipped_bit_in_a_saved_folder_is_detected(model: DecoderModule, tmp_path: Path) -> None:
    save(model, tmp_path / "own")
    file = tmp_path / "own" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256"):
        load(tmp_path / "own")


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    split_into_shards(folder)
    first = load_file(folder / "model-1-of-2.safetensors")
    second = load_file(folder / "model-2-of-2.safetensors")
    save_file(second | dict([first.popitem()]), folder / "model-2-of-2.safetensors")
    with pytest.raises(CheckpointError, match="is also in"):
        load(folder)


def test_published_gpt2_files_are_loaded(tmp_path: Path) -> None:
    """They lack the prefix of the names, and hold attention masks."""
    spec = {"model_type": "gpt2", "vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    original = build(family("gpt2").spec(spec), torch.float32)
    export(original, tmp_path / "gpt2", "gpt2")
    theirs = load_file(tmp_path / "gpt2" / "model.safetensors")
    published = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    published |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    save_file(published, tmp_path / "gpt2" / "model.safetensors")
    assert torch.equal(load(tmp_path / "gpt2")(random_ids(1, 7)), original(random_ids(1, 7)))
