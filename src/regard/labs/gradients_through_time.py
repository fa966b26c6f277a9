"""Gradients through a plain recurrent network vanish or explode with the distance they travel.

The gradient of h_T with respect to h_1 is a product of T - 1 matrices diag(1 - h²) W_h. It shrinks by the same factor
per step if the factors are below 1 and grows if they are above: a straight line over T on a logarithmic scale.

Measured: ‖∂h_T/∂h_1‖ of a tanh network whose W_h is orthogonal times a radius, at the origin, where tanh' is 1. Then
ReLU networks learn the mean of fifty numbers by plain gradient descent, with and without clipping. Their W_h is a
permutation times 1.3: ReLU does not change the positive states of a permutation, so that every network explodes; with
other orthogonal matrices some states become zero. The training step must refuse a loss or gradient that is not finite
before it changes the weights.

Hochreiter 1991; Bengio et al. 1994; Pascanu et al. 2013 (clipping).
"""

# ledger: anc.rnn.gradients

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.layout import TokenLayout
from regard.objectives.base import LossResult
from regard.parts.recurrent import RNN, RecurrentCell
from regard.training.step import NonFinite, take_step

WIDTH = 32
RADII = (0.5, 0.9, 1.0, 1.5)
LENGTH, EXPLODING = 50, 1.3  # of the trained networks: tokens, radius
MEAN_SQUARE = 0.25  # the loss of predicting zero, since the mean of many numbers in [0, 1] is near a half


def run(bench: Bench) -> Findings:
    norms = {f"radius {radius}": [] for radius in RADII}
    for distance in bench.each("gradients", bench.setting(range(5, 101, 5), range(5, 21, 5))):
        for radius in RADII:
            norms[f"radius {radius}"].append((distance, gradient_norm(radius, distance, bench.seed)))
    slopes = {name: log_slope(points) for name, points in norms.items()}
    runs = {"clipped": train(bench, 1.0), "not clipped": train(bench, 0.0)}
    table = [{"network": name, "log10 of the norm per step": s, "r²": r} for name, (s, r) in slopes.items()]
    (down, r2_down), (up, r2_up) = slopes["radius 0.9"], slopes["radius 1.5"]
    clipped, unclipped = runs["clipped"], runs["not clipped"]
    checks = [
        Check(
            "radius 0.9: a straight line with slope log10 0.9 = -0.046 per step",
            f"slope {down:.3f}, r² {r2_down:.3f}",
            abs(down - math.log10(0.9)) < 0.002 and r2_down > 0.99,
        ),
        Check(
            "radius 1.5: a straight line with slope log10 1.5 = 0.176 per step",
            f"slope {up:.3f}, r² {r2_up:.3f}",
            abs(up - math.log10(1.5)) < 0.002 and r2_up > 0.99,
        ),
        Check(
            f"clipped training runs to the end and reaches a tenth of the loss of predicting zero ({MEAN_SQUARE})",
            str(clipped),
            not clipped.error and clipped.final_loss < 0.1 * MEAN_SQUARE,
        ),
        Check(
            "unclipped training diverges; the step refuses a loss that is not finite and leaves the weights unchanged",
            str(unclipped),
            bool(unclipped.error) and unclipped.unchanged,
        ),
    ]
    plots = [
        Plot("distance in steps", "‖∂h_T/∂h_1‖", norms, "gradients through time", "y"),
        Plot("step", "loss", {name: list(enumerate(r.losses)) for name, r in runs.items()}, "training", "y"),
    ]
    return Findings(table, checks, plots)


@dataclass(frozen=True)
class TrainingRun:
    losses: list[float]
    error: str  # of the training step; "" if there was none
    unchanged: bool  # the refused step has left all weights finite and unchanged

    @property
    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-20:])

    def __str__(self) -> str:
        return f"stopped at step {len(self.losses)}: {self.error}" if self.error else f"loss {self.final_loss:.4f}"


def gradient_norm(radius: float, distance: int, seed: int) -> float:
    """‖∂h_T/∂h_1‖ by autograd, with the same inputs and weights for every distance."""
    torch.manual_seed(seed)
    network = orthogonal_network(RNN(), radius).double()
    h = torch.zeros(1, WIDTH, dtype=torch.float64, requires_grad=True)

    def last_state(h: Tensor) -> Tensor:
        for _ in range(distance):
            (h,) = network.step(torch.zeros(1, WIDTH, dtype=torch.float64), h)
        return h[0]

    jacobian = torch.autograd.functional.jacobian(last_state, h, vectorize=True)
    assert isinstance(jacobian, Tensor)
    return torch.linalg.matrix_norm(jacobian.squeeze(1), 2).item()


def orthogonal_network(spec: RNN, radius: float, permutation: bool = False) -> RecurrentCell:
    """A network whose W_h is a random orthogonal matrix, or a random permutation, times the radius."""
    network = spec.cell(WIDTH, WIDTH)
    matrix = torch.eye(WIDTH)[torch.randperm(WIDTH)] if permutation else torch.empty(WIDTH, WIDTH)
    with torch.no_grad():
        network.h_proj.weight.copy_(radius * (matrix if permutation else nn.init.orthogonal_(matrix)))
    return network


def log_slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(slope, r²) of log10 y over x by least squares."""
    x = torch.tensor([p[0] for p in points], dtype=torch.float64)
    y = torch.tensor([p[1] for p in points], dtype=torch.float64).log10()
    x, y = x - x.mean(), y - y.mean()
    slope = (x * y).sum() / (x * x).sum()
    variance = (y * y).sum()
    return slope.item(), 1.0 if variance < 1e-12 else (1 - ((y - slope * x) ** 2).sum() / variance).item()


def train(bench: Bench, clip: float) -> TrainingRun:
    torch.manual_seed(bench.seed)
    network = orthogonal_network(RNN(activation="relu"), EXPLODING, permutation=True)
    model = nn.ModuleList([network, nn.Linear(WIDTH, 1)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, error, unchanged = [], "", True
    for _ in bench.each("training, clipped" if clip else "training, not clipped", range(bench.training(200, 5))):
        batch, weights = Batch(x=torch.rand(16, LENGTH, WIDTH)), [p.detach().clone() for p in model.parameters()]
        try:
            losses.append(take_step(model, mean_of_row, batch, optimizer, clip)["loss"])
        except NonFinite as refused:
            error = str(refused)
            unchanged = all(
                torch.equal(a, b) and a.isfinite().all() for a, b in zip(model.parameters(), weights, strict=True)
            )
            break
    return TrainingRun(losses or [math.inf], error, unchanged)


def mean_of_row(model: nn.Module, batch: Batch) -> LossResult:
    """Squared error of predicting the mean of a row's first coordinates from the last state."""
    network, readout = model.children()
    rows, length, _ = batch.x.shape
    predicted = readout(network(batch.x, TokenLayout.whole(rows, length)))[:, -1, 0]
    return (predicted - batch.x[:, :, 0].mean(1)).square().sum(), torch.tensor(float(len(predicted))), {}
