"""GGUF files: what is written is what is read, here, by the format's own library and by `transformers`."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from regard.checkpoint import CheckpointError, load
from regard.checkpoint.gguf import export_gguf, open_gguf
from regard.checkpoint.gguf.reading import BLOCKS, find
from regard.families import FamilyError, family
from regard.gguf_header import read_header
from regard.models.decoder import DecoderModule
from tests.checkpoint.gguf.files import LLAMA, MODELS, tiny, written
from tests.laws import error, text


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_it_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, file = written(MODELS[name], tmp_path)
    back = load(file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert dict(back.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(map(torch.equal, back.parameters(), model.parameters()))
    if "llama3" in name:  # its divisors come back, in float32
        assert error(back(text(2, 30)), model(text(2, 30))) < 1e-5
    else:
        assert back.spec == model.spec
        assert torch.equal(back(text(2, 30)), model(text(2, 30)))


def test_the_library_reads_the_same_header(tmp_path: Path) -> None:
    _, file = written(MODELS["llama, llama3 rope"], tmp_path, "q8_0")
    theirs, ours = gguf.GGUFReader(file), read_header(file)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == pytest.approx(fields)
    places = {t.name: (t.shape.tolist()[::-1], t.tensor_type, t.data_offset) for t in theirs.tensors}
    assert {n: (list(p.shape), p.type, p.start) for n, p in ours.tensors.items()} == places
    stored = {t.name: t.tensor_type.name for t in theirs.tensors}
    assert stored["blk.0.attn_q.weight"] == stored["token_embd.weight"] == "Q8_0"
    assert stored["blk.0.attn_norm.weight"] == stored["rope_freqs.weight"] == "F32"


@torch.no_grad()
@pytest.mark.parametrize(("form", "bound"), [("f16", 2.0**-11), ("q8_0", 0.5 / 127)])
def test_what_a_form_costs(form: str, bound: float, tmp_path: Path) -> None:
    """Half a step of the largest number: in float16 of each, in Q8_0 of the 32 of a block (its scale rounded too)."""
    model, file = written(LLAMA, tmp_path, form)
    for (name, back), weight in zip(load(file).named_parameters(), model.parameters(), strict=True):
        if weight.dim() == 1:
            assert torch.equal(back, weight), name
            continue
        largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
        scale = weight.abs().clamp_min(2.0**-14) if form == "f16" else largest * (1 + 127 * 2.0**-10)
        assert ((back - weight).abs() <= bound * scale).all(), name


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("form", ["f32", pytest.param("q8_0", marks=pytest.mark.slow)])
def test_transformers_reads_it(name: str, form: str, tmp_path: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    _, file = written(MODELS[name], tmp_path, form)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokens = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(0))
    assert error(load(file)(tokens), theirs.eval()(tokens).logits) < 1e-5


@pytest.mark.parametrize("kind", [*BLOCKS, "BF16", "F16"])
def test_every_kind_of_block(kind: str, tmp_path: Path) -> None:
    """Random bits, of which the library makes the same numbers; a few rows at a time or all at once."""
    stored = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[stored]
    rows, row = 5, 2 * block
    raw = np.random.default_rng(0).integers(0, 256, (rows, row // block * size), np.uint8)
    if kind in ("BF16", "F16"):
        raw = np.random.default_rng(0).standard_normal((rows, row)).astype(np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = find(read_header(tmp_path / "x.gguf"))["x"]
    assert found.shape == (rows, row)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, stored).copy()).float()
    assert torch.equal(found.read().float().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    spec = family("gpt2").spec(MODELS["gpt2"] | {"activation_function": "relu"})
    with pytest.raises(FamilyError, match="GGUF gpt2 model cannot express .*activation='relu', only 'gelu_tanh'"):
        export_gguf(spec.build(0), tmp_path / "x.gguf", "gpt2")
    with pytest.raises(FamilyError, match="cannot express .*beta_fast=8.0, only 32.0"):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
        export_gguf(tiny(LLAMA | {"rope_parameters": yarn}), tmp_path / "x.gguf", "llama")
    with pytest.raises(FamilyError, match="GGUF qwen2 model cannot express a divisor for every pair"):
        export_gguf(tiny(MODELS["llama, llama3 rope"] | {"model_type": "qwen2"}), tmp_path / "x.gguf", "qwen2")
    with pytest.raises(FamilyError, match="architecture 'lama' have no family here; did you mean 'llama'"):
        export_gguf(tiny(LLAMA), tmp_path / "x.gguf", "lama")
    with pytest.raises(CheckpointError, match="not as 'q4_k'"):
        export_gguf(tiny(LLAMA), tmp_path / "x.gguf", "llama", "q4_k")  # ty: ignore
    assert not list(tmp_path.iterdir())


def test_a_weight_past_half_precision_is_refused(tmp_path: Path) -> None:
    model = tiny(LLAMA)
    assert isinstance(model, DecoderModule)
    with torch.no_grad():
        model.embedding.weight[3, 4] = 1e5
    with pytest.raises(CheckpointError, match=r"token_embd\.weight has a weight of 1e\+05, past float16's 65504"):
        export_gguf(model, tmp_path / "x.gguf", "llama", "f16")
    assert not list(tmp_path.iterdir())


def test_a_file_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = written(LLAMA, tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'regard\[gguf\]'"):
        open_gguf(file)


@pytest.mark.slow
def test_the_peak_is_one_copy_of_the_model(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    export_gguf(family("llama").spec(LLAMA | sizes).build(0), tmp_path / "big.gguf", "llama", "q8_0")
    code = """
import resource, sys
import gguf
from regard.checkpoint import load
import regard.families.llama
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load(sys.argv[1])
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
sys.exit(peak > 1.25 * sum(p.nbytes for p in model.parameters()))
"""
    file = str(tmp_path / "big.gguf")
    subprocess.run([sys.executable, "-c", code, file], check=True, env=os.environ | {"PYTHONPATH": "src"})
