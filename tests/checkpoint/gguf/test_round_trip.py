"""GGUF files round-trip, and the gguf library and `transformers` read the same values from them."""

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
from regard.checkpoint.gguf import export_gguf
from regard.checkpoint.gguf.reading import open_tensors
from regard.families import FamilyError, family
from regard.formats.gguf_layouts import LAYOUTS
from regard.gguf_header import read_header
from regard.models.decoder import DecoderModule
from tests.checkpoint.gguf.tiny_models import LLAMA, MODELS, build_tiny, export_tiny
from tests.laws import error, random_ids


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_float32_round_trips_exactly(name: str, tmp_path: Path) -> None:
    model, file = export_tiny(MODELS[name], tmp_path)
    reloaded = load(file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert dict(reloaded.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(map(torch.equal, reloaded.parameters(), model.parameters()))
    assert "llama3" in name or reloaded.spec == model.spec  # the llama3 scaling is read back as float32 divisors
    assert error(reloaded(random_ids(2, 30)), model(random_ids(2, 30))) < 1e-5


def test_the_gguf_library_reads_the_same_header(tmp_path: Path) -> None:
    _, file = export_tiny(MODELS["llama, llama3 rope"], tmp_path, "q8_0")
    theirs, ours = gguf.GGUFReader(file), read_header(file)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == pytest.approx(fields)
    infos = {t.name: (t.shape.tolist()[::-1], t.tensor_type, t.data_offset) for t in theirs.tensors}
    assert {n: (list(p.shape), p.type, p.start) for n, p in ours.tensors.items()} == infos
    types = {t.name: t.tensor_type.name for t in theirs.tensors}
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == types["rope_freqs.weight"] == "F32"


@torch.no_grad()
@pytest.mark.parametrize(("format", "bound"), [("f16", 2.0**-11), ("q8_0", 0.5 / 127)])
def test_the_rounding_error_is_at_most_half_a_step(format: str, bound: float, tmp_path: Path) -> None:
    """A float16 step is relative to each number, a Q8_0 step to the largest of 32 numbers, with a float16 scale."""
    model, file = export_tiny(LLAMA, tmp_path, format)
    for (name, reloaded), weight in zip(load(file).named_parameters(), model.parameters(), strict=True):
        if weight.dim() == 1:
            assert torch.equal(reloaded, weight), name
            continue
        largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
        scale = weight.abs().clamp_min(2.0**-14) if format == "f16" else largest * (1 + 127 * 2.0**-10)
        assert ((reloaded - weight).abs() <= bound * scale).all(), name


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("format", ["f32", pytest.param("q8_0", marks=pytest.mark.slow)])
def test_logits_equal_those_of_transformers(name: str, format: str, tmp_path: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    _, file = export_tiny(MODELS[name], tmp_path, format)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokens = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(0))
    assert error(load(file)(tokens), theirs.eval()(tokens).logits) < 1e-5


@pytest.mark.parametrize("kind", [*(type.upper() for type in LAYOUTS), "BF16", "F16"])
def test_every_type_is_dequantized_as_by_the_gguf_library(kind: str, tmp_path: Path) -> None:
    """The blocks hold random bits."""
    tensor_type = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    rows, columns = 5, 2 * block
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block * block_bytes), np.uint8)
    if kind in ("BF16", "F16"):
        raw = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_tensors(read_header(tmp_path / "x.gguf"))["x"]
    assert found.shape == (rows, columns)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, tensor_type).copy()).float()
    assert torch.equal(found.read().float().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_spec_that_the_format_cannot_express_is_refused(tmp_path: Path) -> None:
    spec = family("gpt2").spec(MODELS["gpt2"] | {"activation_function": "relu"})
    with pytest.raises(FamilyError, match="GGUF gpt2 model cannot express .*activation='relu', only 'gelu_tanh'"):
        export_gguf(spec.build(0), tmp_path / "x.gguf", "gpt2")
    with pytest.raises(FamilyError, match="cannot express .*beta_fast=8.0, only 32.0"):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
        export_gguf(build_tiny(LLAMA | {"rope_parameters": yarn}), tmp_path / "x.gguf", "llama")
    with pytest.raises(FamilyError, match="GGUF qwen2 model cannot express one divisor per RoPE frequency"):
        export_gguf(build_tiny(MODELS["llama, llama3 rope"] | {"model_type": "qwen2"}), tmp_path / "x.gguf", "qwen2")
    with pytest.raises(FamilyError, match="architecture 'lama' are not supported; did you mean 'llama'"):
        export_gguf(build_tiny(LLAMA), tmp_path / "x.gguf", "lama")
    with pytest.raises(CheckpointError, match="format='q4_k' is not supported; choose one of f32, f16, bf16, q8_0"):
        export_gguf(build_tiny(LLAMA), tmp_path / "x.gguf", "llama", "q4_k")  # ty: ignore
    assert not list(tmp_path.iterdir())


def test_a_weight_above_the_float16_maximum_is_refused(tmp_path: Path) -> None:
    model = build_tiny(LLAMA)
    assert isinstance(model, DecoderModule)
    with torch.no_grad():
        model.embedding.weight[3, 4] = 1e5
    with pytest.raises(
        CheckpointError, match=r"token_embd\.weight has a weight of 1e\+05, above the float16 maximum 65504"
    ):
        export_gguf(model, tmp_path / "x.gguf", "llama", "f16")
    assert not list(tmp_path.iterdir())


def test_the_gguf_library_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # an import of it fails
    _, file = export_tiny(LLAMA, tmp_path, "q4_0")
    load(file)


@pytest.mark.slow
def test_peak_memory_is_one_copy_of_the_model(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    export_gguf(family("llama").spec(LLAMA | sizes).build(0), tmp_path / "big.gguf", "llama", "q8_0")
    code = """
import resource, sys
from regard.checkpoint import load
import regard.families.llama
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load(sys.argv[1])
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
sys.exit(peak > 1.25 * sum(p.nbytes for p in model.parameters()))
"""
    file = str(tmp_path / "big.gguf")
    subprocess.run([sys.executable, "-c", code, file], check=True, env=os.environ | {"PYTHONPATH": "src"})
