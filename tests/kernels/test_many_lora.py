"""The low-rank products of many adapters in a batch equal those of one row at a time."""

import pytest
import torch
from torch import Tensor

from regard.kernels.many_lora import add_lora, add_lora_grouped, gathered, grouped, reference

INDICES = {
    "one": [2, 2, 2, 2],
    "none": [-1, -1, -1, -1],
    "mixed": [1, -1, 0, 1, 2, -1, 0],
    "few rows per adapter": [2, 0, -1, 1, 0],
    "single row": [0],
}


def draw(index: list[int], length: int, dtype: torch.dtype, inputs: int = 20, outputs: int = 24, rank: int = 5) -> list:
    """y, x, a, b, scale, index; the second adapter has a smaller rank."""
    torch.manual_seed(len(index))
    rows = len(index)
    y, x = torch.randn(rows, length, outputs), torch.randn(rows, length, inputs)
    a, b = torch.randn(3, rank, inputs) / inputs**0.5, torch.randn(3, outputs, rank)
    a[1, rank // 2 :], b[1, :, rank // 2 :] = 0, 0
    scale = torch.tensor([0.5, 2.0, 3.0])
    return [*(tensor.to(dtype) for tensor in (y, x, a, b, scale)), torch.tensor(index, dtype=torch.int32)]


def expected(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> Tensor:
    """Token by token, entry by entry of the sum."""
    result = y.clone()
    for row, adapter in enumerate(index.tolist()):
        if adapter >= 0:
            for token in range(x.shape[1]):
                low = (a[adapter] * x[row, token]).sum(-1)  # (r,)
                result[row, token] += scale[adapter] * (b[adapter] * low).sum(-1)
    return result


@pytest.mark.parametrize(
    "function",
    [reference, grouped, gathered, add_lora, add_lora_grouped],
    ids=["reference", "grouped", "gathered", "chosen", "operator"],
)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", INDICES)
def test_every_form_equals_plain_sums(function, length: int, name: str) -> None:
    arguments = draw(INDICES[name], length, torch.float64)
    result, y = expected(*arguments), arguments[0]
    before = y.clone()
    function(*arguments)
    assert (y - result).abs().max() < 1e-13
    without = arguments[-1] < 0
    assert torch.equal(y[without], before[without])


@pytest.mark.parametrize("function", [reference, grouped, gathered])
@pytest.mark.parametrize("name", INDICES)
def test_bfloat16_with_a_scale_in_float32(function, name: str) -> None:
    arguments = draw(INDICES[name], 1, torch.bfloat16)
    arguments[4] = arguments[4].float()
    result = expected(*(tensor.double() for tensor in arguments[:5]), arguments[5])
    function(*arguments)
    assert (arguments[0] - result).abs().max() <= 0.02 * result.abs().max()


@pytest.mark.parametrize("name", INDICES)
def test_a_row_does_not_depend_on_the_other_rows(name: str) -> None:
    arguments = draw(INDICES[name], 3, torch.float64)
    alone = [tensor.clone() for tensor in arguments[:2]]
    grouped(*arguments)
    for row in range(len(INDICES[name])):
        y, x, index = alone[0][row : row + 1], alone[1][row : row + 1], arguments[-1][row : row + 1]
        grouped(y, x, *arguments[2:5], index)
        assert (y - arguments[0][row]).abs().max() < 1e-14


def test_rows_may_be_flattened_or_have_more_dimensions() -> None:
    y, x, *matrices = draw(INDICES["mixed"], 6, torch.float64)
    whole = y.clone()
    add_lora(whole, x, *matrices)
    for shape in ((42,), (7, 2, 3)):
        result = y.clone().view(*shape, -1)
        add_lora(result, x.view(*shape, -1), *matrices)
        assert torch.equal(result.view_as(whole), whole)


def test_a_compiled_graph_reads_the_current_index() -> None:
    """The index decides the groups, so it must not be a constant of the graph."""
    y, x, a, b, scale, index = draw([1, -1, 0], 1, torch.float64)

    @torch.compile(fullgraph=True, backend="eager")
    def run(y: Tensor, index: Tensor) -> Tensor:
        y = y * 1
        add_lora(y, x, a, b, scale, index)
        return y

    for each in ([1, -1, 0], [-1, 2, 2]):
        index.copy_(torch.tensor(each))
        assert (run(y, index) - expected(y, x, a, b, scale, index)).abs().max() < 1e-13
