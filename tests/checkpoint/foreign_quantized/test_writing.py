"""Exports of quantized layers: the layouts of compressed-tensors and bitsandbytes, read back and by other libraries."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.adapt import dequantize_linears, quantize_linears
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.replace_modules import replace_modules
from regard.adapt.w8a8 import W8A8Linear
from regard.checkpoint import CheckpointError, export, load
from regard.checkpoint.gguf import export_gguf
from regard.families import family
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.gguf_blocks import GGUFBlocks
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from tests.checkpoint.foreign_quantized.packers import in_float32, words
from tests.checkpoint.foreign_quantized.test_reading import IDS, LLAMA, MIXTRAL, NEOX, PHI3

FP8 = Float("float8_e4m3fn")
FORMATS: list[NumberFormat] = [
    Integer(8), Integer(8, group="tensor"), Integer(8, False, 32, "float16"), Integer(4, True, 16, "float16"),
    Integer(4, False, 32, "float16"), Integer(4, False), Integer(3, False, 32, "bfloat16"), Integer(2, True, 16),
    FP8, Float("float8_e4m3fn", 16), NF4(), NF4(double=False), NF4(32),
]  # fmt: skip
PATH = "stack.blocks.0.sublayers.0.body.q_proj"
THEIRS = "model.layers.0.self_attn.q_proj"


def quantized(config: dict[str, Any], format: NumberFormat) -> nn.Module:
    model = family(config["model_type"]).spec(config).build(0).eval()
    head = model.head
    quantize_linears(model, format)
    model.head = head  # as `regard quantize` without --head
    return model


def with_int8_inputs(model: nn.Module) -> nn.Module:
    def make(_: str, layer: nn.Module) -> nn.Module:
        assert isinstance(layer, QuantizedLinear)
        shape = (layer.out_features, layer.in_features)
        return W8A8Linear(layer.format, layer.stored, shape, layer.bias)

    replace_modules(model, lambda _, module: isinstance(module, QuantizedLinear), make)
    return model


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids)


@pytest.mark.parametrize("config", [LLAMA, PHI3, NEOX], ids=["llama", "phi3", "gpt_neox"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_an_exported_folder_has_the_same_weights(format: NumberFormat, config: dict[str, Any], tmp_path: Path) -> None:
    """Phi-3 and GPT-NeoX fuse projections; where rows share scales, that is refused."""
    model = quantized(config, format)
    export(model, tmp_path / "out", config["model_type"])
    loaded = load(tmp_path / "out")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert layers
    for name, layer in layers.items():
        found = loaded.get_submodule(name)
        assert isinstance(found, QuantizedLinear), name
        assert torch.equal(found.weight, layer.weight), name
    assert torch.equal(logits(loaded), logits(model))
    assert sum(tensor.nbytes for tensor in load_file(tmp_path / "out/model.safetensors").values()) < sum(
        parameter.nbytes for parameter in family(config["model_type"]).spec(config).build(0).parameters()
    )


def test_rounded_inputs_are_part_of_the_scheme(tmp_path: Path) -> None:
    model = with_int8_inputs(quantized(LLAMA, Integer(8)))
    export(model, tmp_path / "out", "llama")
    group = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["format"] == "int-quantized" and group["input_activations"]["strategy"] == "token"
    loaded = load(tmp_path / "out")
    assert sum(isinstance(layer, W8A8Linear) for layer in loaded.modules()) == 14
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (3, False), (8, False)])
def test_words_are_those_of_the_loops(bits: int, symmetric: bool, tmp_path: Path) -> None:
    """The layout of pack-quantized by plain loops, and the entries of config.json."""
    model = quantized(LLAMA, Integer(bits, symmetric, 32, "float16"))
    export(model, tmp_path / "out", "llama")
    layer, tensors = model.get_submodule(PATH), load_file(tmp_path / "out/model.safetensors")
    assert isinstance(layer, QuantizedLinear)
    grid = layer.format.grid(layer.stored)
    zeros = grid.get("zero", torch.tensor(1 << bits - 1)).float()
    codes = (layer.weight / grid["scale"].float()).round() + zeros
    assert torch.equal(tensors[f"{THEIRS}.weight_packed"], words(codes.long().tolist(), bits))
    assert torch.equal(tensors[f"{THEIRS}.weight_shape"], torch.tensor([64, 64]))
    assert torch.equal(tensors[f"{THEIRS}.weight_scale"], layer.stored["scale"].float())
    if not symmetric:
        expected = words(layer.stored["zero"].t().long().tolist(), bits).t()
        assert torch.equal(tensors[f"{THEIRS}.weight_zero_point"], expected)
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert settings["format"] == "pack-quantized" and settings["ignore"] == ["lm_head"]
    assert settings["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_layers_in_other_formats_are_named(tmp_path: Path) -> None:
    model = quantized(LLAMA, Integer(4, True, 16, "float16"))
    plain = family("llama").spec(LLAMA).build(0)
    for block in range(2):
        path = f"stack.blocks.{block}.sublayers.1.body.down_proj"
        model.set_submodule(path, QuantizedLinear.of(plain.get_submodule(path), FP8))  # ty: ignore[invalid-argument-type]
    model.set_submodule(PATH, plain.get_submodule(PATH))
    path = "stack.blocks.1.sublayers.0.body.q_proj"
    bf16 = QuantizedLinear.of(plain.get_submodule(path), Float("bfloat16"))  # ty: ignore[invalid-argument-type]
    model.set_submodule(path, bf16)
    export(model, tmp_path / "out", "llama")
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert settings["format"] == "mixed-precision"
    assert settings["ignore"] == [THEIRS, "model.layers.1.self_attn.q_proj", "lm_head"]
    targets = [group["targets"] for group in settings["config_groups"].values()]
    assert [f"model.layers.{i}.mlp.down_proj" for i in range(2)] in targets
    loaded = load(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-6)


def test_a_model_without_quantized_layers_has_no_settings_of_them(tmp_path: Path) -> None:
    export(quantized(LLAMA, Float("bfloat16")), tmp_path / "out", "llama")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert load_file(tmp_path / "out/model.safetensors")[f"{THEIRS}.weight"].dtype == torch.bfloat16


def with_layer(format: NumberFormat, path: str = PATH, config: dict[str, Any] = LLAMA) -> nn.Module:
    """A model of int4 layers, one of them in another format."""
    model = quantized(config, Integer(4, True, 16))
    plain = family(config["model_type"]).spec(config).build(0).get_submodule(path)
    model.set_submodule(path, QuantizedLinear.of(plain, format))  # ty: ignore[invalid-argument-type]
    return model


def zero_of_16() -> nn.Module:
    model = quantized(LLAMA, Integer(4, False, 16))
    model.get_submodule(PATH).get_buffer("zero")[3, 1] = 16
    return model


TIED = LLAMA | {"tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32}


def tied_head() -> nn.Module:
    model = family("llama").spec(TIED).build(0)
    quantize_linears(model, Integer(8))
    return model


@pytest.mark.parametrize(
    ("make", "model_type", "message"),
    [
        (lambda: with_layer(Float("float8_e5m2")), "llama", "is stored as float, but .*e4m3fn, not float8_e5m2"),
        (lambda: with_layer(GGUFBlocks("q4_0")), "llama", "is stored as .*, but compressed-tensors does not have"),
        (lambda: with_layer(NF4()), "llama", "q_proj is stored as nf4 and .* is not, but in a folder of bitsandbytes"),
        (lambda: quantized(LLAMA, NF4(16)), "llama", ", but bitsandbytes has blocks of 32, 64.*, not of 16"),
        (lambda: with_layer(FP8, config=PHI3), "phi3", "the family fuses it with .*k_proj, which has another format"),
        (lambda: quantized(PHI3 | {"hidden_size": 96}, NF4()), "phi3", "the family fuses it as .*, and its rows share"),
        (zero_of_16, "llama", ", but a zero point of 16 has more than 4 bits"),
        (tied_head, "llama", "head is stored as integer, but the config ties it to the embeddings"),
        (lambda: quantized(MIXTRAL, Integer(8)), "mixtral", "no layout has stacked matrices of experts"),
        (lambda: quantized(GPT2, Integer(8)), "gpt2", "the family stores it in another order, as .*h.0.attn.c_attn"),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_hold_is_refused_with_the_remedy(
    make: Any, model_type: str, message: str, tmp_path: Path
) -> None:
    model = make()
    with pytest.raises(CheckpointError, match=message + ".*--dequantize"):
        export(model, tmp_path / "out", model_type)
    assert not (tmp_path / "out").exists()
    dequantize_linears(model)
    if message.startswith("head"):  # it has a matrix of its own, which no spec with a tied head has
        return
    export(model, tmp_path / "out", model_type)
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_a_gguf_file_needs_ordinary_weights(tmp_path: Path) -> None:
    model = quantized(LLAMA | {"attention_bias": False}, Integer(4))
    with pytest.raises(CheckpointError, match="which a GGUF export cannot write; .*with --dequantize"):
        export_gguf(model, tmp_path / "out.gguf", "llama")
    dequantize_linears(model)
    export_gguf(model, tmp_path / "out.gguf", "llama", "f32")
    assert torch.equal(logits(load(tmp_path / "out.gguf")), logits(model))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("config", [LLAMA, PHI3], ids=["llama", "phi3"])
def test_bitsandbytes_reads_nf4(config: dict[str, Any], double: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers.utils.logging.disable_progress_bar()
    # bitsandbytes 0.50 on a CPU does not restore rows that are no whole blocks, even those that it has written
    model = quantized(config | {"intermediate_size": 128}, NF4(double=double))
    export(model, tmp_path / "out", config["model_type"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bitsandbytes on a CPU
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(theirs.model.layers[0].mlp.down_proj).__name__ == "Linear4bit"
    with torch.no_grad():
        found, expected = in_float32(theirs)(IDS).logits, model(IDS)
    assert (found - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize("config", [LLAMA, PHI3], ids=["llama", "phi3"])
@pytest.mark.parametrize("format", [f for f in FORMATS if not isinstance(f, NF4)], ids=str)
def test_transformers_reads_compressed_tensors(format: NumberFormat, config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers.utils.logging.disable_progress_bar()
    model = quantized(config, format)
    export(model, tmp_path / "out", config["model_type"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        found, expected = theirs(IDS).logits, model(IDS)
    assert (found - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
