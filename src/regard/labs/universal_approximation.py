"""One hidden layer fits any continuous function on an interval, better the wider it is; outside, errors are unbounded.

The theorem (Cybenko 1989; Hornik et al. 1989) is about continuous functions on a compact set and sufficient width. It
says nothing about other functions, about inputs outside the set, or about the result of training. Measured: the largest
error of a tanh layer on sin(x) + |x| over [-3, 3] and over the surrounding [-6, -3] and [3, 6], by width. The hidden
weights are random, one draw per seed, and only the output layer is fitted, by least squares, so that training is not
the cause.
"""

# ledger: anc.mlp.universal

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot

INSIDE, OUTSIDE = 3.0, 6.0


def run(bench: Bench) -> Findings:
    widths = bench.setting((4, 8, 16, 32, 64, 128, 256, 512), (4, 8, 16))
    table = []
    for width in bench.each("widths", widths):
        inside, outside = largest_errors(width, bench.seed)
        table.append({"width": width, "largest error inside": inside, "outside": outside})
    inside, outside = ([row[column] for row in table] for column in COLUMNS.values())
    checks = [
        Check("inside, the largest error falls by more than a factor of 50 with width",
              f"{inside[0]:.3g} -> {inside[-1]:.3g}", inside[-1] < 0.02 * inside[0]),
        Check("outside, the largest error is above 1 at every width", f"at least {min(outside):.3g}", min(outside) > 1),
    ]  # fmt: skip
    lines = {label: [(row["width"], row[column]) for row in table] for label, column in COLUMNS.items()}
    plots = [Plot("width of the hidden layer", "largest error", lines, "sin(x) + |x|", "xy")]
    return Findings(table, checks, plots, "Fitted on a grid, evaluated between its points.")


COLUMNS = {"inside [-3, 3]": "largest error inside", "outside, up to 6": "outside"}


def target(x: Tensor) -> Tensor:
    return torch.sin(x) + x.abs()


def largest_errors(width: int, seed: int) -> tuple[float, float]:
    """(inside, outside) of a layer whose tanh units are centered inside."""
    torch.manual_seed(seed)
    steepness = max(2.5, width / (2 * INSIDE))  # grows with the density of the units: a kink needs steep ones
    slopes = steepness * torch.randn(width, dtype=torch.float64)
    centers = INSIDE * (2 * torch.rand(width, dtype=torch.float64) - 1)

    def hidden(x: Tensor) -> Tensor:
        return torch.cat([torch.tanh(slopes * (x.unsqueeze(1) - centers)), torch.ones_like(x).unsqueeze(1)], 1)

    grid = torch.linspace(-INSIDE, INSIDE, 2000, dtype=torch.float64)
    ridge = 1e-12 * torch.eye(width + 1, dtype=torch.float64)
    h = hidden(grid)
    weights = torch.linalg.solve(h.T @ h / len(grid) + ridge, h.T @ target(grid) / len(grid))
    between = (grid[1:] + grid[:-1]) / 2
    positive = torch.linspace(INSIDE, OUTSIDE, 500, dtype=torch.float64)
    outside = torch.cat([-positive, positive])
    return tuple((hidden(x) @ weights - target(x)).abs().max().item() for x in (between, outside))
