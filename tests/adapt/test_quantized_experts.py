"""Stacked weights of experts in few bits: the products, files, adapters and methods of quantization."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from regard.adapt import LoRA, add_lora, merge_lora, quantize_linears
from regard.adapt.quantized import QuantizedExperts, QuantizedLinear, count_stored_weights
from regard.adapt.replace_modules import replace_modules
from regard.checkpoint.model_folder import load, save
from regard.formats.names import format_named
from regard.kernels.grouped_matmul import grouped_linear
from regard.models.decoder import DecoderModule
from regard.parts.attention import Attention
from regard.parts.experts import Experts, GroupedLinear
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.quantization.quantize_model import quantize_model
from regard.quantization.select_layers import select_layers
from tests.laws import block, decoder, random_ids
from tests.laws import build as build_randomized

FORMATS = ("int8", "int4", "int3", "nf4", "fp8", "bf16", "q8_0", "q4_0", "q4_k")
ENDS = torch.tensor([3, 3, 8, 9])  # the second expert has no rows


def layer(bias: bool = True, inputs: int = 256) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(4, inputs, 24, bias).double()


def build(dtype: torch.dtype = torch.float64) -> DecoderModule:
    from dataclasses import replace

    spec = decoder(block(Attention(4, 2, position=Rope()), Experts(4, 2, SwiGLU(64), shared=SwiGLU(64))))
    return build_randomized(replace(spec, width=64), dtype)


def dequantize(model: nn.Module) -> nn.Module:
    replace_modules(
        model,
        lambda _, module: isinstance(module, QuantizedLinear),
        lambda _, module: module.dequantized(),  # ty: ignore[call-non-callable]
    )
    return model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_multiplied_by_the_dequantized_matrix_of_their_expert(name: str, bias: bool) -> None:
    plain, format = layer(bias), format_named(name)
    quantized, x = QuantizedExperts.of(plain, format), torch.randn(9, 256, dtype=torch.float64)
    for expert, matrix in enumerate(plain.weight):  # each is stored as a matrix of its own
        alone = format.dequantize(format.quantize(matrix), torch.float64)
        assert torch.equal(quantized.weight[expert], alone)
    expected = grouped_linear(x, quantized.weight, plain.bias, ENDS)
    torch.testing.assert_close(quantized(x, ENDS), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(quantized.dequantized()(x, ENDS), expected, rtol=1e-12, atol=1e-12)
    assert count_stored_weights(quantized) == plain.weight.numel()
    assert sum(tensor.nbytes for tensor in quantized.stored.values()) == 4 * format.bytes((24, 256))


def test_gradients_of_the_rows_equal_finite_differences() -> None:
    quantized = QuantizedExperts.of(layer(inputs=64), format_named("int4"))
    x = torch.randn(9, 64, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: quantized(x, ENDS), (x,), fast_mode=True)


def test_only_the_matrices_of_used_experts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, read = QuantizedExperts.of(layer(), format_named("int8")), []
    matrix = quantized.matrix
    monkeypatch.setattr(quantized, "matrix", lambda expert: read.append(expert) or matrix(expert))
    quantized(torch.randn(9, 256, dtype=torch.float64), ENDS)
    assert read == [0, 2, 3]


@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "q8_0"])
def test_a_saved_model_has_the_same_experts(name: str, tmp_path: Path) -> None:
    model = build(torch.float32)
    names = quantize_linears(model, format_named(name))
    assert sum("experts" in name for name in names) == 2 * 3
    expected = dequantize(build(torch.float32))
    save(model, tmp_path / "model")
    loaded, ids = load(tmp_path / "model"), random_ids(2, 9)
    assert torch.equal(loaded(ids), model(ids)) and not torch.equal(model(ids), expected(ids))
    assert isinstance(loaded.get_submodule(next(name for name in names if "experts" in name)), QuantizedExperts)
    reference = dequantize(model).double()
    exact = load(tmp_path / "model", dtype=torch.float64)
    torch.testing.assert_close(exact(ids), reference(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("base", ["int4", "nf4"])
def test_adapters_of_quantized_experts_are_trained_and_merged(base: str) -> None:
    model, ids = build(), random_ids(2, 9)
    add_lora(model, LoRA(2, base=format_named(base)), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    model(ids).square().sum().backward()
    of_experts = [p for name, p in model.named_parameters() if ".experts." in name and "lora_A" in name]
    assert len(of_experts) == 2 * 3 and all(p.grad is not None and p.grad.abs().sum() > 0 for p in of_experts)
    with torch.no_grad():
        before = model(ids)
        merge_lora(model)
        torch.testing.assert_close(model(ids), before, rtol=1e-9, atol=1e-9)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


@pytest.mark.parametrize("method", ["nearest", "clip", "gptq", "awq"])
def test_methods_round_each_expert_by_its_own_tokens(method: str) -> None:
    model = build(torch.float32)
    torch.manual_seed(1)
    sample = [(random_ids(4, 24), None) for _ in range(4)]
    results = quantize_model(model, select_layers(model, format_named("int4", "32")), method, sample)
    found = [result for result in results if ".experts." in result.name]
    assert len(found) == 2 * 3
    for result in found:
        if method == "nearest":
            assert result.error == pytest.approx(result.nearest_error)
        elif method == "gptq":
            assert result.error < result.nearest_error, result.name
        else:
            assert result.error <= result.nearest_error * (1 + 1e-6), result.name
        assert isinstance(model.get_submodule(result.name), QuantizedExperts)
