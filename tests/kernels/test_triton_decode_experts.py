"""The grouped matrix product of a decode step equals one product per row, in Triton's interpreter or on a GPU."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE


@pytest.mark.parametrize("sizes", [[1, 0, 0], [0, 0, 1], [2, 0, 21], [0, 5, 0]])
@pytest.mark.parametrize("outputs, columns", [(70, 48), (16, 300)])
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(sizes: list[int], outputs: int, columns: int) -> None:
    from regard.kernels.triton_decode_experts import expert_linear

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), columns, generator=generator)
    weight = torch.randn(len(sizes), outputs, columns, generator=generator)
    ends = torch.tensor(sizes).cumsum(0)
    experts = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    expected = torch.stack([weight[expert].double() @ row.double() for expert, row in zip(experts, x, strict=True)])
    found = expert_linear(x.to(DEVICE), weight.to(DEVICE), ends.to(DEVICE)).cpu()
    assert (found - expected).abs().max() <= 1e-4
