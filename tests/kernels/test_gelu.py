"""Both GELUs equal torch's, forward and backward, also where the derivative is written out."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import gelu as kernels

FUNCTIONS = [(kernels.gelu, F.gelu), (kernels.gelu_tanh, partial(F.gelu, approximate="tanh"))]
VALUES = torch.cat([torch.linspace(-40, 40, 801), torch.tensor([0.0, -0.0, 1e-30, -300.0, 300.0])]).double()


@pytest.mark.parametrize("arm", [False, True])
@pytest.mark.parametrize(("ours", "torchs"), FUNCTIONS, ids=["erf", "tanh"])
def test_values_and_gradients_equal_those_of_torch(
    ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor], arm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ARM", arm)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        results = []
        for function in (ours, torchs):
            x = VALUES.to(dtype, copy=True).requires_grad_()
            y = function(x)
            results.append((y, *torch.autograd.grad(y, x, torch.linspace(-1, 1, len(x), dtype=dtype))))
        for a, b in zip(*results, strict=True):
            assert a.dtype == dtype and torch.allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_second_derivatives_and_vmap(approximate: str) -> None:
    def function(x: Tensor) -> Tensor:
        return kernels.GELU.apply(x, approximate)

    x = torch.linspace(-3, 3, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)
    gradient = torch.func.vmap(torch.func.grad(lambda row: function(row).sum()))(x)
    assert torch.equal(gradient, torch.autograd.grad(function(x).sum(), x)[0])


@pytest.mark.parametrize(("ours", "torchs"), FUNCTIONS, ids=["erf", "tanh"])
def test_compiled_without_a_graph_break(
    ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ARM", True)
    torch._dynamo.reset()
    x = VALUES.clone().requires_grad_()
    y = torch.compile(ours, backend="eager", fullgraph=True)(x)
    expected = torch.autograd.grad(torchs(x).sum(), x)[0]
    assert torch.allclose(y, torchs(x), rtol=0, atol=1e-13)
    assert torch.allclose(torch.autograd.grad(y.sum(), x)[0], expected, rtol=0, atol=1e-13)
