"""The associative scan equals the equation as a loop: any length and split, with documents and padding."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.kernels.recurrent.linear_recurrence import linear_recurrence


def loop(a: Tensor, b: Tensor, h: Tensor, segments: Tensor, valid: Tensor) -> Tensor:
    states = []
    for t in range(a.shape[1]):
        if t > 0:
            h = h * (segments[:, t] == segments[:, t - 1]).unsqueeze(-1)
        h = torch.where(valid[:, t, None], a[:, t] * h + b[:, t], h)
        states.append(h)
    return torch.stack(states, 1)


def random_inputs(length: int) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    a, b = torch.rand(2, length, 3, dtype=torch.float64), torch.randn(2, length, 3, dtype=torch.float64)
    segments = torch.tensor([0, 1]).unsqueeze(1) * (torch.arange(length) > length // 2)
    return a, b, torch.randn(2, 3, dtype=torch.float64), segments, torch.rand(2, length) > 0.3


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13, 64, 65])
def test_scan_equals_the_loop_and_any_split(length: int) -> None:
    a, b, h, segments, valid = random_inputs(length)
    all_valid, one_document = torch.ones_like(valid), torch.zeros_like(segments)
    whole = linear_recurrence(a, b, h)
    assert torch.allclose(whole, loop(a, b, h, one_document, all_valid), rtol=1e-12, atol=1e-12)
    assert torch.allclose(
        linear_recurrence(a, b, h, segments, valid), loop(a, b, h, segments, valid), rtol=1e-12, atol=1e-12
    )
    cut = length // 2
    if cut:
        first = linear_recurrence(a[:, :cut], b[:, :cut], h)
        second = linear_recurrence(a[:, cut:], b[:, cut:], first[:, -1])
        assert torch.allclose(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    a, b, h, segments, valid = random_inputs(7)
    assert gradcheck(
        lambda *x: linear_recurrence(*x, segments, valid), (a.requires_grad_(), b.requires_grad_(), h.requires_grad_())
    )
