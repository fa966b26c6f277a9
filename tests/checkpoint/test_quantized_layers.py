"""Model folders with quantized layers: the same logits after loading, in few bytes; invalid ones are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from regard.adapt.quantized import QuantizedLinear
from regard.adapt.replace_modules import replace_modules
from regard.adapt.w8a8 import W8A8Linear
from regard.checkpoint import CheckpointError, load, save
from regard.families import family
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.models.decoder import DecoderModule
from regard.spec import SpecError
from tests.checkpoint.test_model_folder import LLAMA
from tests.laws import build

FORMATS = [Integer(8), Integer(4, False, 8, "float16"), Integer(3), Float("float8_e5m2"), Float("float16"), NF4(16)]
LAYER = "stack.blocks.1.sublayers.0.body.q_proj"


def quantized(format: NumberFormat, tied: bool = False) -> DecoderModule:
    model = build(family("llama").spec({**LLAMA, "tie_word_embeddings": tied, "attention_bias": True}), torch.float32)

    def make(_: str, layer: nn.Module) -> nn.Module:
        assert isinstance(layer, nn.Linear)
        return QuantizedLinear.of(layer, format)

    replace_modules(model, lambda name, module: type(module) is nn.Linear and (name != "head" or tied), make)
    return model.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_loaded_model_has_the_same_stored_tensors_and_logits(
    format: NumberFormat, tied: bool, tmp_path: Path
) -> None:
    """With tied=True, the head is stored beside the embeddings that it shared."""
    model, ids = quantized(format, tied), torch.arange(12).view(2, 6)
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    layer = loaded.get_submodule(LAYER)
    assert isinstance(layer, QuantizedLinear) and layer.format == format
    states = model.state_dict(), loaded.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype and torch.equal(tensor, states[1][name]), name
    with torch.no_grad():
        assert torch.equal(model(ids), loaded(ids))
    assert load(tmp_path / "model", dtype=torch.float64)(ids).dtype == torch.float64


def test_layers_with_rounded_inputs_are_restored(tmp_path: Path) -> None:
    model, ids = quantized(Integer(8)), torch.arange(12).view(2, 6)
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, QuantizedLinear)
    model.set_submodule(LAYER, W8A8Linear(layer.format, layer.stored, (16, 16), layer.bias))
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert [name for name, module in loaded.named_modules() if isinstance(module, W8A8Linear)] == [LAYER]
    with torch.no_grad():
        assert torch.equal(model(ids), loaded(ids))
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    config["quantization"]["int8_inputs"] = ["norm"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="int8_inputs in config.json must list names of `layers`"):
        load(tmp_path / "model", checked=True)


def test_the_files_have_the_planned_bytes(tmp_path: Path) -> None:
    model = quantized(Integer(4, group=8))
    save(model, tmp_path / "model")
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    planned = sum(layer.format.bytes((layer.out_features, layer.in_features)) for layer in layers)
    planned += sum(parameter.nbytes for parameter in model.parameters())
    assert sum(tensor.nbytes for tensor in load_file(tmp_path / "model/model.safetensors").values()) == planned


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({f"{LAYER}x": {"kind": "integer"}}, "is no layer of this model, not a linear one"),
        ({"embedding": {"kind": "integer"}}, "embedding is a Embedding, not a linear one"),
        ({LAYER: {"kind": "integer", "bits": 4, "group": 7}}, "group=7 does not divide the 16 inputs"),
        ({LAYER: {"kind": "integer", "bits": 9}}, "bits=9 must be from 2 to 8"),
        ({LAYER: {"kind": "integer", "bits": 4}}, r"q_proj.codes should be \(16, 8\) in U8"),
        ({LAYER: {"kind": "float", "dtype": "float8_e5m2"}}, "in F8_E5M2 by the config, found"),
        ({}, "belongs to no part of this model|is missing"),
        ([], "must have `layers`"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_refused(layers: object, expected: str, tmp_path: Path) -> None:
    save(quantized(Integer(8)), tmp_path / "model")
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    if layers and isinstance(layers, dict):
        layers = config["quantization"]["layers"] | layers
    file.write_text(json.dumps({**config, "quantization": {"layers": layers}}))
    with pytest.raises((CheckpointError, SpecError, ValueError), match=expected):
        load(tmp_path / "model", checked=True)


def test_a_missing_stored_tensor_is_named(tmp_path: Path) -> None:
    save(quantized(Integer(8)), tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    del tensors[f"{LAYER}.scale"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"q_proj.scale \(16, 1\) is missing"):
        load(tmp_path / "model", checked=True)
