"""Rounding methods against dense references in float64, and the errors that they minimize."""

import pytest
import torch
from torch import Tensor

from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.quantization.clipping import RATIOS, clip_weight
from regard.quantization.gptq import round_with_compensation
from regard.quantization.quantize_model import METHODS
from regard.quantization.statistics import InputStatistics

FORMATS = [Integer(4, group=8), Integer(3, False, 16), Integer(4, group="tensor"), Float("float8_e4m3fn"), NF4(16)]


def draw(outputs: int = 12, inputs: int = 32, tokens: int = 200) -> tuple[Tensor, InputStatistics, Tensor]:
    """A weight, the statistics of correlated inputs of different sizes, and the inputs."""
    rng = torch.Generator().manual_seed(0)
    mixing = torch.randn(inputs, inputs, generator=rng, dtype=torch.float64)
    sizes = torch.linspace(0.1, 4, inputs, dtype=torch.float64)
    x = (torch.randn(tokens, inputs, generator=rng, dtype=torch.float64) @ mixing) * sizes
    statistics = InputStatistics(inputs, torch.float64, x.device)
    statistics.add(x)
    return torch.randn(outputs, inputs, generator=rng, dtype=torch.float64) * 0.1, statistics, x


def optimal_brain_quantization(
    weight: Tensor, products: Tensor, format: NumberFormat, stored: dict[str, Tensor], order: list[int], damping: float
) -> Tensor:
    """One input after the other; all that are left move to the minimum of the error, by the inverse of their H."""
    damped = products + damping * products.diagonal().mean() * torch.eye(len(products), dtype=torch.float64)
    weight, grid, left = weight.clone(), format.grid(stored), list(order)
    while left:
        j, later = left[0], left[1:]
        rounded = format.nearest(weight[:, j], {name: tensor[:, j] for name, tensor in grid.items()})
        inverse = torch.linalg.inv(damped[left][:, left])
        weight[:, later] -= torch.outer((weight[:, j] - rounded) / inverse[0, 0], inverse[0, 1:])
        weight[:, j] = rounded
        left = later
    return weight


@pytest.mark.ledger("q.gptq")
@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_gptq_equals_the_dense_solution(format: NumberFormat, by_size: bool) -> None:
    weight, statistics, _ = draw()
    stored, products = format.quantize(weight), statistics.products
    order = products.diagonal().argsort(descending=True).tolist() if by_size else list(range(len(products)))
    expected = optimal_brain_quantization(weight, products, format, stored, order, 0.01)
    for block in (5, 128):
        found = round_with_compensation(weight, products, format, stored, 0.01, by_size, block)
        torch.testing.assert_close(format.dequantize(found, torch.float64), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.ledger("q.gptq")
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_gptq_has_a_smaller_output_error_than_clipping_and_this_than_rounding(format: NumberFormat) -> None:
    weight, statistics, x = draw()
    errors = {}
    for name in ("nearest", "clip", "gptq"):
        rounded = format.dequantize(METHODS[name].round(weight, statistics, format), torch.float64)
        errors[name] = float(((rounded - weight) @ x.t()).square().sum())
        assert float(statistics.output_error(rounded - weight)) == pytest.approx(errors[name], rel=1e-9)
    assert errors["gptq"] < 0.9 * errors["nearest"] and errors["gptq"] < errors["clip"]


def test_inputs_that_are_always_zero_change_nothing() -> None:
    weight, _, x = draw()
    x = x * (torch.arange(32) % 5 != 0)
    statistics = InputStatistics(32, torch.float64, x.device)
    statistics.add(x)
    format = Integer(4, group=8)
    stored = format.quantize(weight)
    rounded = format.dequantize(round_with_compensation(weight, statistics.products, format, stored), torch.float64)
    assert torch.equal(rounded[:, ::5], format.dequantize(stored, torch.float64)[:, ::5])
    assert not torch.equal(rounded, format.dequantize(stored, torch.float64))


@pytest.mark.parametrize("format", [Integer(3, group=8), Integer(3, False, "channel")], ids=str)
def test_the_range_of_a_group_has_the_least_error_of_the_candidates(format: Integer) -> None:
    weight, statistics, _ = draw(3)
    clipped, size = clip_weight(weight, statistics, format), format.group_size(32)
    for row in range(3):
        for start in range(0, 32, size):
            part, group = slice(start, start + size), weight[row, start : start + size]
            products, errors = statistics.products[part, part], []
            single = Integer(3, format.symmetric)
            for ratio in RATIOS:
                low, high = ratio * group.min().clamp_max(0), ratio * group.max().clamp_min(0)
                values = group.clamp(low, high).unsqueeze(0)
                difference = (single.dequantize(single.quantize(values), torch.float64) - group)[0]
                errors.append((float(difference @ products @ difference), values[0]))
            best = min(errors, key=lambda pair: pair[0])
            torch.testing.assert_close(clipped[row, part], best[1], rtol=0, atol=0)
