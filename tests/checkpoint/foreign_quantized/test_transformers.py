"""Checkpoints that `transformers` quantizes and saves, on a CPU: the same logits here as there."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from regard.adapt.quantized import QuantizedLinear
from regard.checkpoint import load
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from tests.checkpoint.foreign_quantized.packers import fp8, in_float32, write_pair
from tests.checkpoint.foreign_quantized.test_reading import FP8, LLAMA, check_equal

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaForCausalLM, {"num_key_value_heads": 2}),
    "qwen2": (transformers.Qwen2ForCausalLM, {"num_key_value_heads": 2}),
    "qwen3": (transformers.Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral": (transformers.MistralForCausalLM, {"num_key_value_heads": 2}),
    "phi3": (transformers.Phi3ForCausalLM, {"num_key_value_heads": 2}),
    "gpt_neox": (transformers.GPTNeoXForCausalLM, {}),
}
IDS = torch.arange(40).view(2, 20)


def quantize(folder: Path, family: str, **settings: Any) -> Any:
    """A random model, quantized by bitsandbytes and saved in the folder."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers.utils.logging.disable_progress_bar()
    architecture, sizes = FAMILIES[family]
    torch.manual_seed(0)
    architecture(architecture.config_class(**SIZES | sizes)).save_pretrained(folder / "plain")
    config = transformers.BitsAndBytesConfig(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bitsandbytes on a CPU
        theirs = architecture.from_pretrained(folder / "plain", quantization_config=config, dtype=torch.float32).eval()
        theirs.save_pretrained(folder / "quantized")
    return in_float32(theirs)


def formats(model: nn.Module) -> set[NumberFormat]:
    return {layer.format for layer in model.modules() if isinstance(layer, QuantizedLinear)}


def check_logits(theirs: Any, ours: nn.Module) -> None:
    with torch.no_grad():
        expected, found = theirs(IDS).logits, ours(IDS)
    assert (found - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_nf4_with_double_quantization(family: str, tmp_path: Path) -> None:
    """Codes stay; where a projection is fused, so that rows move, their scales become numbers."""
    theirs = quantize(tmp_path, family, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    ours = load(tmp_path / "quantized")
    fused = {NF4(), NF4(double=False)}
    assert formats(ours) == (fused if family in ("phi3", "gpt_neox") else {NF4()})
    assert sum(isinstance(layer, QuantizedLinear) for layer in ours.modules()) == (12 if family == "gpt_neox" else 14)
    check_logits(theirs, ours)


@pytest.mark.parametrize("storage", ["uint8", "float32"])
def test_nf4_without_double_quantization(storage: str, tmp_path: Path) -> None:
    """bnb_4bit_quant_storage: the dtype under which a file has the bytes of the codes."""
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": storage}
    theirs = quantize(tmp_path, "llama", load_in_4bit=True, **options)
    ours = load(tmp_path / "quantized")
    assert formats(ours) == {NF4(double=False)}
    check_logits(theirs, ours)


def test_fp4_is_dequantized(tmp_path: Path) -> None:
    theirs = quantize(tmp_path, "llama", load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True)
    with pytest.warns(UserWarning, match="14 quantized weights become ordinary ones.*levels are those of 'fp4'"):
        ours = load(tmp_path / "quantized")
    check_logits(theirs, ours)


def test_weights_of_llm_int8(tmp_path: Path) -> None:
    """Inputs are rounded there and not here, so the weights are compared."""
    theirs = quantize(tmp_path, "llama", load_in_8bit=True, llm_int8_skip_modules=["down_proj", "lm_head"])
    ours = load(tmp_path / "quantized")
    assert formats(ours) == {Integer(8)}
    for i, layer in enumerate(theirs.model.layers):
        weight = layer.self_attn.o_proj.weight
        scale = load_file(tmp_path / "quantized/model.safetensors")[f"model.layers.{i}.self_attn.o_proj.SCB"]
        expected = weight.double() * scale.double()[:, None] / 127
        found = ours.get_submodule(f"stack.blocks.{i}.sublayers.0.body.o_proj")
        assert isinstance(found, QuantizedLinear)
        torch.testing.assert_close(found.format.dequantize(found.stored, torch.float64), expected, rtol=1e-7, atol=0)
        assert type(ours.get_submodule(f"stack.blocks.{i}.sublayers.1.body.down_proj")) is nn.Linear


@pytest.mark.parametrize("block", [[32, 16], None])
def test_fp8_is_what_transformers_dequantizes(block: list[int] | None, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    settings = FP8 | {"weight_block_size": block, "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    pack = fp8(None if block is None else (32, 16))
    folder, plain = write_pair(tmp_path, LLAMA | {"architectures": ["LlamaForCausalLM"]}, pack, settings)
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).float().eval()
    ours = load(folder)
    assert formats(ours) == {Float("float8_e4m3fn", "channel" if block is None else 16)}
    with torch.no_grad():
        expected, found = theirs(IDS % 40).logits, ours(IDS % 40)
    assert (found - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
    check_equal(load(folder, dtype=torch.float64), load(plain, dtype=torch.float64))


def test_dequantized_weights_have_the_dtype_of_the_config_on_request(tmp_path: Path) -> None:
    quantize(tmp_path, "llama", load_in_4bit=True, bnb_4bit_quant_type="fp4")
    config = tmp_path / "quantized/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    with pytest.warns(UserWarning, match="become ordinary ones"):
        assert {p.dtype for p in load(tmp_path / "quantized").parameters()} == {torch.float32}
    with pytest.warns(UserWarning, match="become ordinary ones"):
        assert {p.dtype for p in load(tmp_path / "quantized", dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
