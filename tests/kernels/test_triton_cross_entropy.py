"""The Triton kernel of cross-entropy equals the torch form; its gradient replaces the logits in place."""

import pytest
import torch

from regard.kernels import linear_cross_entropy as torch_form
from tests.kernels.triton_device import DEVICE


@pytest.mark.parametrize("scale, cap", [(1.0, None), (0.5, 3.0)])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.2, 0.01)])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_kernel_equals_the_torch_form(
    scale: float, cap: float | None, needs_grad: bool, smoothing: float, z_loss: float
) -> None:
    from regard.kernels.triton_cross_entropy import BLOCK, loss_of_logits

    z = 4 * torch.randn(5, BLOCK + 70, device=DEVICE)
    z[1, 7] = z[1, 9] = 30.0  # argmax chooses the first of equal logits
    targets = torch.tensor([int(z[0].argmax()), 7, 9 if cap is None else 7, BLOCK + 69, 3], device=DEVICE)
    z[2] = z[1]
    weights = torch.rand(5, device=DEVICE)
    expected = torch_form.loss_of_logits(z, targets, weights, scale, cap, needs_grad, smoothing, z_loss)
    logits = z.clone()
    losses, correct = loss_of_logits(logits, targets, weights, scale, cap, needs_grad, smoothing, z_loss)
    assert (losses - expected[0]).abs().max() <= 1e-5
    assert torch.equal(correct, expected[1])
    assert (logits - expected[2]).abs().max() <= 1e-6
