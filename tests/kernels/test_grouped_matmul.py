"""The grouped matrix product (one matrix per range of rows) equals a loop, by torch's operation and in slices."""

import warnings

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.compat import supports_grouped_mm
from regard.kernels.grouped_matmul import grouped_linear, matmul_slices, sort_by_expert

SIZES = {
    "even": [3, 3, 3, 3],
    "one empty": [5, 0, 4, 3],
    "all in the last": [0, 0, 0, 12],
    "first and last empty": [0, 7, 5, 0],
}


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0)


def draw(dtype: torch.dtype, rows: int = 8, columns: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((12, columns), (4, rows, columns), (4, rows))
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def row_by_row(x: Tensor, weight: Tensor, bias: Tensor, sizes: list[int]) -> Tensor:
    experts = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    return torch.stack([weight[expert] @ row + bias[expert] for expert, row in zip(experts, x, strict=True)])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "grouped"),
    [
        (torch.float32, 8, 12, True),
        (torch.float32, 7, 12, False),  # rows of weights whose size is not a multiple of 16 bytes
        (torch.float32, 8, 5, False),
        (torch.float64, 8, 12, False),
    ],
)
def test_every_row_is_multiplied_by_its_matrix(
    sizes: list[int], dtype: torch.dtype, rows: int, columns: int, grouped: bool
) -> None:
    inputs = draw(dtype, rows, columns)
    assert supports_grouped_mm(*inputs[:2]) == grouped
    found, expected = grouped_linear(*inputs, ends_of(sizes)), row_by_row(*inputs, sizes)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    assert torch.allclose(found, expected, atol=tolerance)
    grad = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    for found_grad, expected_grad in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        assert torch.allclose(found_grad, expected_grad, atol=tolerance)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradcheck_of_the_slices(sizes: list[int]) -> None:
    x, weight, _ = draw(torch.float64, rows=3, columns=5)
    assert gradcheck(lambda x, weight: matmul_slices(x, weight, ends_of(sizes)), (x, weight), fast_mode=True)


def test_sorting_by_expert_is_stable_and_puts_rows_without_expert_last() -> None:
    order, ends = sort_by_expert(torch.tensor([2, 0, 4, 2, 1, 4, 0, 2]), 4)
    assert order.tolist() == [1, 6, 4, 0, 3, 7, 2, 5]
    assert ends.tolist() == [2, 3, 6, 6]


def test_autocast_casts_as_for_a_linear_layer() -> None:
    x, weight, bias = draw(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_linear(x, weight, bias, ends_of([3, 3, 3, 3])).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_meta_tensors_have_the_shape_of_the_product(dtype: torch.dtype) -> None:
    x, weight, bias = (tensor.to("meta") for tensor in draw(dtype))
    assert grouped_linear(x, weight, bias, torch.empty(4, dtype=torch.int64, device="meta")).shape == (12, 8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiles_in_one_graph(dtype: torch.dtype) -> None:
    inputs, ends = draw(dtype), ends_of([5, 0, 4, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns on its first compilation
        compiled = torch.compile(lambda *inputs: grouped_linear(*inputs).square(), fullgraph=True)
        found = compiled(*inputs, ends)
        expected = grouped_linear(*inputs, ends).square()
        grads = [torch.autograd.grad(y, inputs, torch.ones(12, 8, dtype=dtype)) for y in (found, expected)]
    for f, e in zip((found, *grads[0]), (expected, *grads[1]), strict=True):
        assert torch.allclose(f, e, atol=1e-4 if dtype == torch.float32 else 1e-12)
