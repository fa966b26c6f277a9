"""The Triton kernel of RoPE equals the torch form, forward and backward."""

import pytest
import torch

from regard.parts.position.rope import rotate_pairs
from tests.kernels.triton_device import DEVICE


@pytest.mark.parametrize("heads, dim, rows", [(3, 12, 2), (4, 16, 1)])
def test_kernel_equals_the_torch_form_and_its_inverse_undoes_it(heads: int, dim: int, rows: int) -> None:
    from regard.kernels.triton_rope import rotate as kernel

    x = torch.randn(2, 5, heads, dim + 4, device=DEVICE, requires_grad=True)
    rotated_part = x[..., :dim].transpose(1, 2)  # strided as in a layer, which leaves the last coordinates unrotated
    angles = 6 * torch.rand(rows, 1, 5, dim // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    found, expected = kernel(rotated_part, cos, sin), rotate_pairs(rotated_part, cos, sin, "half")
    assert (found - expected).abs().max() <= 1e-6
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weights).sum(), x, retain_graph=True)[0] for out in (found, expected)]
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-6
    assert (kernel(found, cos, sin, True) - rotated_part).abs().max() <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_sequences_use_the_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    x = torch.randn(2, 100, 4, 32, device="cuda", dtype=dtype).transpose(1, 2)
    angles = 6 * torch.rand(2, 1, 100, 16, device="cuda", dtype=torch.float64)
    cos_sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = rotate_pairs(x, *cos_sin, "half")
    halves = zip(x.split(50, 2), *(w.split(50, 2) for w in cos_sin), strict=True)  # too short for the kernel
    of_torch = torch.cat([rotate_pairs(*half, "half") for half in halves], 2)
    exact = rotate_pairs(x.double(), angles.cos(), angles.sin(), "half")
    kernel_error, torch_error = ((out - exact).abs().max() for out in (found, of_torch))
    assert kernel_error <= 2 * torch_error + torch.finfo(dtype).eps
