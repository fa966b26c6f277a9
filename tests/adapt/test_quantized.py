"""Linear layers with stored weights: outputs, gradients of inputs, and what is kept for backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.adapt.quantized import QuantizedLinear
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4

FORMATS = [Integer(8), Integer(4, symmetric=False, group=32), Float("float8_e4m3fn"), NF4()]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_dequantized_weight(format: NumberFormat, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 24, bias).double()
    layer = QuantizedLinear.of(linear, format)
    x = torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    weight = format.dequantize(format.quantize(linear.weight), torch.float64)
    y, expected = layer(x), F.linear(x, weight, linear.bias)
    assert torch.equal(layer.weight, weight)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    (found,), (wanted,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert [name for name, _ in layer.named_parameters()] == (["bias"] if bias else [])
    assert sum(buffer.nbytes for buffer in layer.buffers()) == format.bytes(linear.weight.shape)


def test_backward_keeps_no_dequantized_weight() -> None:
    kept: list[torch.Tensor] = []
    layer = QuantizedLinear.of(nn.Linear(64, 64, bias=False), NF4())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert not any(tensor.numel() == 64 * 64 for tensor in kept)


def test_a_layer_is_restored_from_its_state() -> None:
    first, second = (QuantizedLinear.of(nn.Linear(64, 32), NF4()) for _ in range(2))
    assert not torch.equal(first.weight, second.weight)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.weight, second.weight)
