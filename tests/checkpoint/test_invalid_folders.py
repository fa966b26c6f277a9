"""Invalid model folders are refused with a typed error that names the fault."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.checkpoint import CheckpointError, export, load, save
from regard.families import FamilyError, family
from regard.spec import SpecError
from regard.weights.table import WeightsError
from tests.checkpoint.test_model_folder import LLAMA, split_into_shards
from tests.laws import build

NORM = "model.norm.weight"
Change = Callable[[dict], object]  # of parsed JSON or of tensors by name, in place
Damage = Callable[[Path], None]  # of a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid Hugging Face folder with a single weight file."""
    export(build(family("llama").spec(LLAMA), torch.float32), tmp_path / "model", "llama")
    return tmp_path / "model"


def change_json(file: Path, change: Change) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def change_config(**values: object) -> Damage:
    return lambda folder: change_json(folder / "config.json", lambda config: config.update(values))


def change_tensors(change: Change) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def truncate(name: str, fraction: float) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * fraction)])

    return damage


def change_index(change: Change) -> Damage:
    def damage(folder: Path) -> None:
        split_into_shards(folder)
        change_json(folder / "model.safetensors.index.json", change)

    return damage


def rename_shard(name: object) -> Damage:
    return change_index(lambda index: index["weight_map"].update({"lm_head.weight": name}))


def replace_by_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def nest_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "regard", "spec": ' + '{"kind":' * 50_000 + "}" * 50_000 + "}")


def nest_spec(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    spec = '{"kind": "repeat", "blocks": [' * 400 + "]}" * 400
    (folder / "config.json").write_text('{"model_type": "regard", "spec": ' + spec + "}")


def change_header(change: Change, length: int | None = None) -> Damage:
    """Change the header of the weight file, and optionally declare a wrong length."""

    def damage(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(content[:8], "little")
        values = json.loads(content[8 : 8 + size])
        change(values)
        changed = json.dumps(values).encode()
        declared = (len(changed) if length is None else length).to_bytes(8, "little")
        (folder / "model.safetensors").write_bytes(declared + changed + content[8 + size :])

    return damage


def change_entry(**values: object) -> Damage:
    return change_header(lambda header: header[NORM].update(values))


def duplicate_name(folder: Path) -> None:
    """Repeat a name in the header, which two readers may interpret differently."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    changed = content[8 : 8 + size].replace(b"{", b'{"' + NORM.encode() + b'":{},', 1)
    (folder / "model.safetensors").write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])


def replace_by_fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


INVALID = {
    "truncated weights": (truncate("model.safetensors", 0.6), "model.safetensors is damaged"),
    "empty weights": (truncate("model.safetensors", 0), "model.safetensors is damaged"),
    "truncated config": (truncate("config.json", 0.5), "config.json is not valid JSON"),
    "deep config": (nest_config, "not valid JSON"),
    "nested spec": (nest_spec, "nested"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "a list for a config": (lambda folder: (folder / "config.json").write_text("[]"), "holds list, expected an object"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds neither"),
    "a pickle": (replace_by_pickle, "pytorch_model.bin, a pickle that can run code.*save_pretrained"),
    "a header longer than the file": (change_header(len, 1 << 40), "at most .* bytes, found 1099511627776"),
    "a header of 2^64 bytes": (change_header(len, (1 << 64) - 1), "its header should have at most"),
    "a truncated header": (change_header(len, 40), "header is not valid JSON"),
    "a duplicate name": (duplicate_name, "a name occurs twice"),
    "a gap": (change_entry(data_offsets=[8, 72]), "should start at byte"),
    "negative offsets": (change_entry(data_offsets=[-64, 0]), "should have a dtype, a shape and data_offsets, found"),
    "an end before its start": (change_entry(data_offsets=[64, 0]), "should have a dtype, a shape and data_offsets"),
    "fewer bytes than its shape": (
        change_entry(shape=[17]),
        r"norm.weight \(17,\) in F32 should have 68 bytes, found 64",
    ),
    "another dtype than its bytes": (
        change_entry(dtype="F16"),
        r"norm.weight \(16,\) in F16 should have 32 bytes, found 64",
    ),
    "a shape of 2^122": (change_entry(shape=[1 << 61, 1 << 61]), "in F32 should have 2126.* bytes, found 64"),
    "a hundred dimensions": (change_entry(shape=[1] * 100), "should have a dtype, a shape and data_offsets"),
    "no dtype": (change_entry(dtype=None), "should have a dtype, a shape and data_offsets"),
    "a tensor called nan": (change_header(lambda h: h.update(nan=h.pop(NORM))), r"norm.weight \(16,\) is missing"),
    "a name of 9999 characters": (
        change_header(lambda h: h.update({"x" * 9999: h.pop(NORM)})),
        "at most 500 characters",
    ),
    "a named pipe": (replace_by_fifo, "holds neither"),
    "a large config": (lambda folder: (folder / "config.json").write_text(" " * (5 << 20)), "files of more than"),
    "missing tensor": (change_tensors(lambda t: t.pop(NORM)), r"model\.norm\.weight \(16,\) is missing"),
    "extra tensor": (change_tensors(lambda t: t.update(extra=torch.ones(2))), r"extra \(2,\) belongs to no part"),
    "wrong shape": (change_tensors(lambda t: t.update({NORM: torch.ones(17)})), r"should be \(16,\).* found \(17,\)"),
    "integers": (change_tensors(lambda t: t.update({NORM: torch.ones(16).int()})), "stored as I32"),
    "wider than the files": (change_config(hidden_size=1 << 20), "the config has .* parameters, but the files have"),
    "deeper than the files": (
        change_config(num_hidden_layers=10**4),
        "the config has .* parameters, but the files have",
    ),
    "deeper than any model": (
        change_config(num_hidden_layers=10**9),
        "num_hidden_layers=1000000000 must be at most 10000",
    ),
    "one layer too many": (change_config(num_hidden_layers=3), r"model\.layers\.2\..* is missing"),
    "one layer too few": (change_config(num_hidden_layers=1), r"model\.layers\.1\..* belongs to no part"),
    "past 64 bits": (change_config(hidden_size=1 << 62, intermediate_size=1 << 62), "too large"),
    "a vocabulary of 10^30": (change_config(vocab_size=10**30), "too large"),
    "a billion heads": (
        change_config(num_attention_heads=10**9, num_key_value_heads=7, head_dim=2),
        "heads=1000000000",
    ),
    "unknown family": (change_config(model_type="lama"), "did you mean 'llama'"),
    "a family without a similar name": (
        change_config(model_type="deberta"),
        "no family 'deberta'; choose one of bamba, bart",
    ),
    "a family that is not a string": (change_config(model_type=["llama"]), "there is no family"),
    "a shard in the parent folder": (rename_shard("../model.safetensors"), "must be the name of a .safetensors file"),
    "a shard with an absolute path": (rename_shard("/etc/passwd"), "must be the name of a .safetensors file"),
    "a shard of another type": (rename_shard("model.bin"), "must be the name of a .safetensors file"),
    "a missing shard": (rename_shard("model-3.safetensors"), "model-3.safetensors is missing from the folder"),
    "a shard that is not a string": (rename_shard(3), "weight_map must map every tensor"),
    "an empty index": (change_index(lambda index: index.update(weight_map={})), "weight_map must map"),
    "an index without map": (change_index(lambda index: index.pop("weight_map")), "weight_map must map"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_an_invalid_folder_is_refused(fault: str, folder: Path) -> None:
    damage, message = INVALID[fault]
    damage(folder)
    with pytest.raises((CheckpointError, WeightsError, FamilyError, SpecError), match=message):
        load(folder)


def test_a_flipped_bit_in_a_saved_folder_is_detected(folder: Path, tmp_path: Path) -> None:
    save(load(folder), tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256"):
        load(tmp_path / "saved")


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    split_into_shards(folder)
    first = load_file(folder / "model-1-of-2.safetensors")
    second = load_file(folder / "model-2-of-2.safetensors")
    save_file(second | dict([first.popitem()]), folder / "model-2-of-2.safetensors")
    with pytest.raises(CheckpointError, match="is also in"):
        load(folder)
