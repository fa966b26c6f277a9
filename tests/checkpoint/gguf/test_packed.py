"""GGUF files whose blocks stay in memory: the same logits and tokens as unpacked, in the bytes of the file."""

from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.stored_weight import QuantizedEmbedding
from regard.checkpoint import CheckpointError, load
from regard.checkpoint.gguf import GGUFFormat, export_gguf
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.text.train import bpe
from regard.text.write_gguf import gguf_metadata
from tests.checkpoint.gguf.tiny_models import LLAMA, MODELS, WIDE, build_tiny, export_tiny
from tests.cli.conftest import regard as command
from tests.laws import error, random_ids


def blocks_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.named_buffers() if name.endswith("blocks")}


@torch.no_grad()
@pytest.mark.parametrize(("name", "mmap"), [*((name, False) for name in MODELS), ("llama", True), ("gpt2", True)])
def test_logits_equal_those_of_the_unpacked_model(name: str, mmap: bool, tmp_path: Path) -> None:
    _, file = export_tiny(MODELS[name], tmp_path, "q4_0" if mmap else "q8_0")
    packed, unpacked = load(file, packed=True, mmap=mmap), load(file)
    assert error(packed(random_ids(2, 30)), unpacked(random_ids(2, 30))) < 1e-6
    linear = [name for name, module in unpacked.named_modules() if type(module) is nn.Linear]
    assert all(isinstance(packed.get_submodule(name), QuantizedLinear) for name in linear)
    assert isinstance(packed.embedding, QuantizedEmbedding)
    for name in (*linear, "embedding"):  # the rows of q and k are permuted, those of GPT-2's qkv divided
        assert torch.equal(packed.get_submodule(name).weight, unpacked.get_submodule(name).weight)
    assert all(parameter.dim() == 1 or "position" in name for name, parameter in packed.named_parameters())


@torch.no_grad()
@pytest.mark.parametrize("format", ["q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs", "q5_1"])
def test_an_engine_generates_the_tokens_of_the_unpacked_model(format: GGUFFormat, tmp_path: Path) -> None:
    _, file = export_tiny(WIDE, tmp_path, format)
    models = [load(file, packed=packed).double() for packed in (True, False)]
    ids = random_ids(1, 12)[0].tolist()
    tokens = [
        [token.id for token in Engine(model, rows=2, capacity=64).generate(ids, Sampling(max_new=20, temperature=0))]
        for model in models
    ]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 20
    assert sum(tensor.nbytes for tensor in blocks_of(models[0]).values()) < file.stat().st_size


@torch.no_grad()
def test_a_tied_head_reads_the_blocks_of_the_embedding(tmp_path: Path) -> None:
    _, file = export_tiny(MODELS["llama, tied"], tmp_path, "q8_0")
    packed = load(file, packed=True)
    assert packed.head.blocks.data_ptr() == packed.embedding.blocks.data_ptr()
    halved = packed.to(torch.bfloat16)
    assert halved.embedding.blocks.dtype == torch.uint8 and halved.embedding(torch.tensor([3])).dtype == torch.bfloat16


def test_a_file_that_is_mapped_is_not_copied(tmp_path: Path) -> None:
    _, file = export_tiny(MODELS["qwen2"], tmp_path, "q8_0")
    packed = load(file, packed=True, mmap=True)
    storages = {tensor.untyped_storage().data_ptr() for tensor in blocks_of(packed).values()}
    assert len(storages) == 1
    with torch.no_grad():
        packed.embedding.blocks.zero_()
    assert load(file).embedding.weight.abs().max() > 0  # the file itself is not written to


def test_tensors_of_other_types_are_numbers(tmp_path: Path) -> None:
    _, file = export_tiny(LLAMA | {"hidden_size": 48, "head_dim": 8}, tmp_path, "q8_0")  # rows of 48: float16
    packed, unpacked = load(file, packed=True), load(file)
    kinds = {type(packed.get_submodule(name)) for name, module in unpacked.named_modules() if type(module) is nn.Linear}
    assert kinds == {nn.Linear, QuantizedLinear}
    assert error(packed(random_ids(2, 9)), unpacked(random_ids(2, 9))) < 1e-6


def test_an_adapter_is_trained_on_packed_layers(tmp_path: Path) -> None:
    _, file = export_tiny(MODELS["llama"], tmp_path, "q8_0")
    gradients = []
    for packed in (True, False):
        model = load(file, packed=packed)
        torch.manual_seed(0)
        regard.add_lora(model, regard.LoRA(4))
        model(random_ids(2, 9)).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    for name, grad in gradients[0].items():
        torch.testing.assert_close(grad, gradients[1][name], rtol=1e-4, atol=1e-6)


def test_a_command_keeps_the_blocks(tmp_path: Path) -> None:
    tokenizer, file = bpe(["a text of some words, some of them again"], 280), tmp_path / "model.gguf"
    export_gguf(build_tiny(LLAMA | {"vocab_size": 280}), file, "llama", "q8_0", gguf_metadata(tokenizer, 280))
    options = ("-p", "a text", "--temperature", 0, "--max-new", 8, "--device", "cpu")
    stored, plain = (command("generate", file, *options, *more) for more in (("--quantize", "stored"), ()))
    assert stored.exit_code == plain.exit_code == 0 and stored.output == plain.output
    llm = regard.load(file, device="cpu", packed=True)
    assert isinstance(llm.model.head, QuantizedLinear)
    assert llm.generate("a text", max_new=8, temperature=0) in plain.output


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    model, file = export_tiny(MODELS["llama"], tmp_path, "q8_0")
    regard.save(model, tmp_path / "folder")
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        load(tmp_path / "folder", packed=True)
    packed = load(file, packed=True)
    with pytest.raises(CheckpointError, match="embedding keeps the blocks of a GGUF file"):
        regard.save(packed, tmp_path / "again")
    for id in (-1, 64):
        with pytest.raises(ValueError, match=f"{id}"):
            packed(torch.tensor([[id]]))
