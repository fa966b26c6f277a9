"""Triton's kernels for many adapters in a batch equal the reference, for decode steps and prompts."""

import pytest
import torch

from regard.kernels.many_lora import reference
from tests.kernels.test_many_lora import draw
from tests.kernels.triton_device import DEVICE


@pytest.mark.parametrize(
    ("index", "length", "tiles"),
    [
        ([1, -1, 0, 2, 2], 1, (16, 32, 32, 2, 2)),  # a decode step: columns and adapters are split among programs
        ([1, -1, 0, 2, 2], 1, (16, 64, 64, 1, 1)),
        ([-1, 2, 0], 11, (16, 32, 32, 3, 1)),  # prompts: tiles with tokens of several rows
        ([-1, -1], 1, (16, 32, 32, 2, 1)),
        ([0], 1, None),
    ],
)
@pytest.mark.parametrize(("rank", "dtype"), [(5, torch.float32), (20, torch.float32), (16, torch.float16)])
def test_the_kernels_equal_the_reference(index: list[int], length: int, tiles, rank: int, dtype: torch.dtype) -> None:
    from regard.kernels.triton_many_lora import LoraTiles, launch

    drawn = draw(index, length, dtype, inputs=100, outputs=72, rank=rank)
    y, x, a, b, scale, rows = (tensor.to(DEVICE) for tensor in drawn)
    scale = scale.float()
    exact = y.double()
    reference(exact, x.double(), a.double(), b.double(), scale.double(), rows)
    before = y.clone()
    launch(y, x, a, b, scale, rows, None if tiles is None else LoraTiles(*tiles))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    assert (y.double() - exact).abs().max() <= tolerance * max(1, exact.abs().max())
    assert torch.equal(y[rows < 0], before[rows < 0])


def test_outputs_may_be_columns_of_a_wider_tensor() -> None:
    """As q, k and v in one tensor."""
    from regard.kernels.triton_many_lora import launch

    y, x, a, b, scale, index = (tensor.to(DEVICE) for tensor in draw([1, -1, 0], 1, torch.float32, 40, 24))
    wide = torch.zeros(3, 1, 64, device=DEVICE)
    wide[..., 16:40] = y
    launch(wide[..., 16:40], x, a, b, scale, index)
    reference(y, x, a, b, scale, index)
    assert (wide[..., 16:40] - y).abs().max() < 1e-5
    assert not wide[..., :16].any() and not wide[..., 40:].any()
