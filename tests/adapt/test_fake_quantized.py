"""Quantization-aware training: the forward equals the quantized model, gradients pass, and checkpoints are ordinary."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.adapt.fake_quantized import FakeQuantization, FakeQuantizedLinear, fake_quantize
from regard.adapt.quantized import QuantizedLinear
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.spec import SpecError
from tests.quantization.test_quantize_model import LINEAR, SPEC

FORMATS = [Integer(4, group=16), Integer(2, False, 32, "float16"), NF4(32), Float("float8_e4m3fn")]


@pytest.mark.ledger("q.qat")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_forward_is_that_of_the_quantized_layer_and_the_gradient_passes(
    format: NumberFormat, bias: bool, dtype: torch.dtype
) -> None:
    linear = nn.Linear(64, 24, bias, dtype=dtype)
    layer, x = FakeQuantizedLinear(linear, format), torch.randn(3, 5, 64, dtype=dtype, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, QuantizedLinear.of(linear, format)(x))
    rounded = format.dequantize(format.quantize(linear.weight), dtype).requires_grad_()
    expected = F.linear(x, rounded, linear.bias)
    found = torch.autograd.grad(y.square().sum(), [x, layer.weight])
    for grad, wanted in zip(found, torch.autograd.grad(expected.square().sum(), [x, rounded]), strict=True):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.ledger("q.qat")
def test_a_trained_model_equals_the_quantized_one_bit_for_bit() -> None:
    model, format = SPEC.build(0), Integer(3, False, 16, "float16")
    names = fake_quantize(model, FakeQuantization(format))
    assert len(names) == LINEAR and model.state_dict().keys() == SPEC.build(0).state_dict().keys()
    ids, optimizer = torch.arange(40).view(2, 20), torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    plain = SPEC.build(1).eval()
    plain.load_state_dict(model.state_dict())
    for name in names:
        layer = plain.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        plain.set_submodule(name, QuantizedLinear.of(layer, format))
    with torch.no_grad():
        assert torch.equal(plain(ids), model.eval()(ids))


def test_layers_are_left_out_and_invalid_shapes_are_refused() -> None:
    names = fake_quantize(SPEC.build(0), FakeQuantization(Integer(8), skip=("*.q_proj",), head=True))
    assert len(names) == LINEAR - 2 + 1
    with pytest.raises(SpecError, match=r"quantize: stack.blocks.0.*group=64 does not divide the 32 inputs"):
        fake_quantize(SPEC.build(0), FakeQuantization())
    with pytest.raises(SpecError, match="no linear layer of a block is left"):
        fake_quantize(SPEC.build(0), replace(FakeQuantization(Integer(8)), skip=("*",)))
