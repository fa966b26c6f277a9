"""FP8 products: equal to products of the rounded tensors, which differ from the originals by the format's rounding."""

import pytest
import torch
from torch import Tensor

from regard.kernels.fp8_linear import E4M3, E5M2, fp8_linear, quantize


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(a: Tensor, dtype: torch.dtype) -> Tensor:
    q, scale = quantize(a, dtype)
    return q.double() * scale.double()


@pytest.mark.parametrize(("dtype", "mantissa"), [(E4M3, 3), (E5M2, 2)])
def test_the_rounding_error_is_half_of_the_last_bit(dtype: torch.dtype, mantissa: int) -> None:
    a = random(64, 64, seed=0)
    smallest = torch.finfo(dtype).smallest_normal * a.abs().max() / torch.finfo(dtype).max
    bound = 2.0 ** -(mantissa + 1) * a.abs().clamp(min=smallest)
    assert ((rounded(a, dtype) - a).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("shape", [(32,), (2, 8), (3, 7)], ids=str)  # 21 rows are padded to 32
def test_outputs_and_gradients_are_those_of_the_rounded_tensors(shape: tuple[int, ...]) -> None:
    x, weight, bias = random(*shape, 48, seed=1), random(32, 48, seed=2), random(32, seed=3)
    dy = random(*shape, 32, seed=4).bfloat16()
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    y = fp8_linear(x, weight, bias)
    y.backward(dy)
    qx, qw = rounded(x.detach(), E4M3), rounded(weight.detach(), E4M3)
    qdy, d = rounded(dy, E5M2).flatten(0, -2), 2.0**-8  # d: the rounding of bfloat16
    assert y.dtype == torch.bfloat16
    expected = {
        "y": (y, qx @ qw.T + bias.detach().double()),
        "dx": (x.grad, (qdy @ qw).view_as(x)),
        "dw": (weight.grad, qdy.T @ qx.flatten(0, -2)),
        "db": (bias.grad, dy.double().flatten(0, -2).sum(0)),
    }
    for name, (result, reference) in expected.items():
        assert result is not None
        error = (result.double() - reference).abs().max() / reference.abs().max()
        assert error <= 2 * d, f"{name}: {error}"


def test_a_frozen_weight_has_no_gradient() -> None:
    x, weight = random(16, 16, seed=5).requires_grad_(), random(16, 16, seed=6)
    fp8_linear(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_a_value_that_is_not_finite_reaches_the_output() -> None:
    for value in (float("nan"), float("inf")):
        x = random(16, 16, seed=7)
        x[3, 4] = value
        assert not fp8_linear(x, random(16, 16, seed=8)).isfinite().all()


def test_zeros_stay_zeros() -> None:
    assert fp8_linear(torch.zeros(16, 16), random(16, 16, seed=9)).eq(0).all()
