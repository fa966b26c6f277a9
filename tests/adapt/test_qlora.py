"""QLoRA: adapters on a base whose linear layers are stored in few bits."""

from pathlib import Path

import pytest
import torch
from torch import nn

from regard.adapt.adapters import adapters, add_lora, disable_adapters, merge_lora
from regard.adapt.lora import LoRA, LoRALinear
from regard.adapt.peft import load_adapter, save_adapter
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.targets import AdapterError
from regard.engine.engine import Engine
from regard.formats.base import NumberFormat
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from tests.laws import MODELS, VOCAB, block, build, random_ids

WIDE = Decoder(VOCAB, 64, (Repeat((block(Attention(4, 2, position=Rope()), SwiGLU(128)),), 2),), tied=False)
FORMATS = [NF4(), Integer(4, symmetric=False, group=16)]


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def with_dequantized_weights(model: nn.Module, format: NumberFormat) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "head" not in name.split("."):
            module.weight.data = format.dequantize(format.quantize(module.weight), module.weight.dtype)


@pytest.mark.ledger("lora.qlora")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_gradients_reach_the_adapter_and_the_base_keeps_its_bits(format: NumberFormat, dora: bool) -> None:
    """As LoRA on a model whose weights were rounded to the format."""
    model, rounded = build(WIDE), build(WIDE)
    with_dequantized_weights(rounded, format)
    for each, base in ((model, format), (rounded, None)):
        add_lora(each, LoRA(4, base=base, dora=dora), seed=0)
        for layer in adapters(each).values():
            torch.nn.init.normal_(layer.matrix("B", "default"), generator=torch.Generator().manual_seed(1))
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    tokens = random_ids(2, 7)
    logits, expected = model(tokens), rounded(tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    logits.square().sum().backward()
    expected.square().sum().backward()
    theirs = dict(rounded.named_parameters())
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name for name, _ in trained)
    for name, parameter in trained:
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-7, atol=1e-9)
    torch.optim.SGD([parameter for _, parameter in trained], 0.1).step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())
    layers = quantized_layers(model)
    shapes = [(layer.out_features, layer.in_features) for layer in layers.values()]
    assert sum(b.nbytes for layer in layers.values() for b in layer.buffers()) == sum(map(format.bytes, shapes))
    linears = [layer for layer in adapters(model).values() if isinstance(layer, LoRALinear)]
    assert {type(layer.base) for layer in linears} == {QuantizedLinear}


def test_the_reference_and_a_merged_model_have_the_weights_of_the_format() -> None:
    model, rounded = build(WIDE), build(WIDE)
    with_dequantized_weights(rounded, NF4())
    tokens = random_ids(2, 7)
    add_lora(model, LoRA(4, base=NF4()), seed=0)
    with disable_adapters(model):
        torch.testing.assert_close(model(tokens), rounded(tokens), rtol=1e-9, atol=1e-9)
    for layer in adapters(model).values():
        torch.nn.init.normal_(layer.matrix("B", "default"))
    adapted = model(tokens)
    merge_lora(model)
    assert not quantized_layers(model)
    torch.testing.assert_close(model(tokens), adapted, rtol=1e-9, atol=1e-9)


def test_layers_that_are_not_targets_are_quantized_too() -> None:
    model = build(WIDE)
    add_lora(model, LoRA(4, targets=("q_proj",), base=NF4()))
    assert {name.split(".")[-1] for name in quantized_layers(model)} >= {"base", "k_proj", "down_proj"}
    tokens = random_ids(2, 7)
    adapted = model(tokens)
    merge_lora(model)
    assert not quantized_layers(model)
    torch.testing.assert_close(model(tokens), adapted, rtol=1e-9, atol=1e-9)


def test_a_stored_adapter_quantizes_the_model_that_it_is_added_to(tmp_path: Path) -> None:
    model, other = build(WIDE), build(WIDE)
    tokens = random_ids(2, 7)
    add_lora(model, LoRA(4, base=Integer(4, group=16)), seed=0)
    for layer in adapters(model).values():
        torch.nn.init.normal_(layer.matrix("B", "default"))
    save_adapter(model, tmp_path)
    load_adapter(other, tmp_path)
    assert torch.equal(other(tokens), model(tokens))
    (tmp_path / "base_format.json").write_text('{"kind": "nf5"}')
    with pytest.raises(AdapterError, match="base_format.json cannot be read: .*did you mean 'nf4'"):
        load_adapter(build(WIDE), tmp_path)


def test_another_dtype_changes_the_weight_and_not_what_is_stored() -> None:
    model = build(WIDE)
    add_lora(model, LoRA(4, base=NF4()))
    before = {name: tensor.clone() for name, tensor in model.named_buffers() if "scale" in name or "codes" in name}
    model.to(torch.float32)
    layer = next(iter(quantized_layers(model).values()))
    assert layer.weight.dtype == torch.float32
    after = dict(model.named_buffers())
    assert before and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_what_cannot_be_quantized_is_refused_and_the_model_is_not_changed() -> None:
    for spec, base, error in (
        (MODELS["latent"], Integer(4, group=2), "is a stacked weight"),
        (WIDE, NF4(1 << 20), "q_proj: nf4: .* no whole blocks"),
    ):
        model = build(spec)
        with pytest.raises(AdapterError, match=error):
            add_lora(model, LoRA(4, base=base))
        assert not quantized_layers(model) and not adapters(model)
    model = build(WIDE)
    add_lora(model, LoRA(4, base=NF4()))
    with pytest.raises(AdapterError, match="use the same base"):
        add_lora(model, LoRA(4, base=Integer(4, group=16)), name="other")


def test_an_engine_refuses_the_adapter_for_a_model_with_other_weights(tmp_path: Path) -> None:
    model = build(WIDE)
    add_lora(model, LoRA(4, base=NF4()))
    save_adapter(model, tmp_path)
    with pytest.raises(AdapterError, match="trained on weights stored as nf4"):
        Engine(build(WIDE)).read_adapter(tmp_path)
