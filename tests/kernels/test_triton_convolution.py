"""The Triton kernel of the short convolution equals the torch form: outputs and all gradients."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.kernels import convolution
from regard.layout import TokenLayout
from tests.kernels.triton_device import DEVICE

from regard.kernels import triton_convolution  # isort: skip: after triton_device, which skips this file without triton


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that short sequences have several tiles."""
    for name, size in {"TOKENS": 8, "TILE": 4, "CHANNELS": 4}.items():
        monkeypatch.setattr(triton_convolution, name, size)


def results(case: list[Tensor | None], layout: TokenLayout, dtype: torch.dtype) -> list[Tensor]:
    case = [None if x is None else x.to(DEVICE, dtype).requires_grad_() for x in case]
    x, weight, bias, tail = case
    outs = convolution.convolve(x, weight, bias, tail, layout)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outs]
    return [*outs, *torch.autograd.grad(outs, [x for x in case if x is not None], grads)]


@pytest.mark.parametrize(
    ("length", "channels", "taps", "biased", "packed", "padded"),
    [
        (19, 6, 4, True, False, False),
        (8, 4, 2, False, False, False),
        (2, 5, 4, True, False, False),
        (21, 4, 3, True, True, False),
        (21, 4, 4, False, True, True),
        (9, 3, 1, True, False, True),
    ],
)
def test_kernel_equals_the_torch_form(
    length: int, channels: int, taps: int, biased: bool, packed: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = [torch.randn(2, length, channels), torch.randn(taps, channels), None, torch.randn(2, taps - 1, channels)]
    case[2] = torch.randn(channels) if biased else None
    segments = (torch.rand(2, length, device=DEVICE) < 0.2).cumsum(1) if packed else None
    valid = torch.rand(2, length, device=DEVICE) < 0.8 if padded else None
    layout = TokenLayout(torch.arange(length, device=DEVICE).expand(2, -1), segments=segments, valid=valid)
    monkeypatch.setattr(convolution, "can_fuse", lambda x, weight: False)
    expected_results = results(case, layout, torch.float64)
    monkeypatch.setattr(convolution, "can_fuse", lambda x, weight: True)
    for found, expected in zip(results(case, layout, torch.float32), expected_results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


def test_activation_checkpointing_does_not_change_the_gradients() -> None:
    case = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((1, 9, 4), (3, 4), (4,), (1, 2, 4))]
    grads = [
        torch.autograd.grad(run(*case, None).sum(), case)
        for run in (triton_convolution.convolve, partial(checkpoint, triton_convolution.convolve, use_reentrant=False))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_kernel_is_used_on_gpus_for_several_tokens_and_few_taps() -> None:
    x = torch.zeros(1, 5, 4, device=DEVICE)
    assert convolution.can_fuse(x, x[0]) == (DEVICE.type == "cuda")
    assert not convolution.can_fuse(x.double(), x[0]) and not convolution.can_fuse(x[:, :1], x[0])
    assert not convolution.can_fuse(x, torch.zeros(9, 4))
