"""Products of integers: exact, within the bound of both roundings, and gradients of the inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.adapt import AdapterError, LoRA, add_lora, merge_lora
from regard.adapt.quantized import QuantizedLinear, pack_weights
from regard.adapt.w8a8 import W8A8Linear, check_w8a8, integer_product, quantize_rows
from regard.formats.integers import Integer
from regard.spec import SpecError


@pytest.mark.ledger("q.int8")
@pytest.mark.parametrize(("n", "k", "m"), [(1, 64, 24), (5, 1536, 7), (33, 8, 16), (2, 4096, 3)])
def test_the_integer_product_is_exact(n: int, k: int, m: int) -> None:
    rng = torch.Generator().manual_seed(n)
    a, b = (torch.randint(-127, 128, shape, generator=rng, dtype=torch.int8) for shape in ((n, k), (m, k)))
    a[0], b[0] = 127, 127  # the largest sum
    found = integer_product(a, b)
    assert found.dtype == torch.int32
    for i in range(n):
        for j in range(m):
            pairs = zip(a[i].tolist(), b[j].tolist(), strict=True)
            assert int(found[i, j]) == sum(x * y for x, y in pairs)


@pytest.mark.ledger("q.int8")
@pytest.mark.parametrize("group", ["channel", "tensor"])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_within_the_bounds_of_both_roundings(group: str, bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 24, bias).double(), torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    format = Integer(8, group="tensor" if group == "tensor" else "channel")
    weights_only = QuantizedLinear.of(linear, format)
    layer = W8A8Linear(format, weights_only.stored, (24, 64), linear.bias, torch.float64)
    exact, weight = F.linear(x, linear.weight, linear.bias), weights_only.weight
    rows, scale = quantize_rows(x.detach().flatten(0, 1))
    rounded = (rows * scale).view_as(x)
    torch.testing.assert_close(layer(x), F.linear(rounded, weight, linear.bias), rtol=1e-6, atol=1e-6)
    w8a16 = F.linear(x.abs(), format.error_bound(weights_only.stored).double())
    assert ((weights_only(x) - exact).abs() <= w8a16 * (1 + 1e-6)).all()
    from_inputs = scale.view(2, 5, 1) / 2 * weight.abs().sum(1)
    assert ((layer(x) - exact).abs() <= (w8a16 + from_inputs) * (1 + 1e-5) + 1e-6).all()
    assert not torch.equal(layer(x), weights_only(x))
    (found,), (expected,) = (torch.autograd.grad(y.sum(), x) for y in (layer(x), F.linear(x, weight)))
    torch.testing.assert_close(found, expected)


def test_zero_rows_and_other_formats() -> None:
    layer = W8A8Linear(Integer(8), Integer(8).quantize(torch.randn(4, 16)), (4, 16))
    assert torch.equal(layer(torch.zeros(3, 16)), torch.zeros(3, 4)) and layer(torch.zeros(0, 16)).shape == (0, 4)
    for format in (Integer(4), Integer(8, symmetric=False), Integer(8, group=8)):
        with pytest.raises(SpecError, match="inputs of eight bits need weights in int8"):
            check_w8a8(format)


def test_weights_are_not_packed_for_the_kernel_that_rounds_inputs_in_another_way() -> None:
    weights_only, x = QuantizedLinear.of(nn.Linear(64, 8), Integer(8)), torch.randn(3, 64)
    layer = W8A8Linear(weights_only.format, weights_only.stored, (8, 64), weights_only.bias)
    expected = layer(x)
    pack_weights(layer)
    assert layer.packing is None and torch.equal(layer(x), expected)


def test_adapters_of_layers_that_round_their_inputs_are_not_merged() -> None:
    """The merged layers would not round them, so their outputs would differ."""
    model = nn.Sequential(nn.Linear(16, 8))
    model[0] = W8A8Linear.of(model[0], Integer(8))
    add_lora(model, LoRA(2))
    with pytest.raises(AdapterError, match=r"rounds its inputs to int8 \(W8A8\).*keep the adapter apart"):
        merge_lora(model)
