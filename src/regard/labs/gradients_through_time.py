"""Gradients through a plain recurrent network vanish or explode with the distance they travel.

The gradient of h_T with respect to h_1 is a product of T - 1 matrices diag(1 - h²) W_h. With factors below 1 it shrinks
by the same factor every step, with factors above 1 it grows so: on a logarithmic scale a straight line over T.

Measured: ‖∂h_T/∂h_1‖ of a tanh network whose W_h is orthogonal times a radius, at the origin, where tanh' is 1. Then
networks without tanh (ReLU, radius 1.3) learn the mean of a hundred numbers by plain gradient descent, clipped and not;
the guard of the training step must stop what is no number before it reaches the weights.

Hochreiter 1991; Bengio et al. 1994; Pascanu et al. 2013 (clipping).
"""

# ledger: anc.rnn.gradients

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.findings import Check, Findings, Plot
from regard.layout import TokenLayout
from regard.objectives.base import LossResult
from regard.parts.recurrent import Recurrence
from regard.parts.rnn import RNN
from regard.training.step import NonFinite, take_step

WIDTH = 32
RADII = (0.5, 0.9, 1.0, 1.5)


def run(bench: Bench) -> Findings:
    norms = {f"radius {radius}": [] for radius in RADII}
    for distance in bench.each("gradients", bench.pick(range(5, 101, 5), range(5, 21, 5))):
        for radius in RADII:
            norms[f"radius {radius}"].append((distance, gradient(radius, distance, bench.seed)))
    slopes = {name: slope(points) for name, points in norms.items()}
    trained = {"clipped": train(bench, 1.0), "not clipped": train(bench, 0.0)}
    table = [{"network": name, "log10 of the norm, a step": s, "r²": r} for name, (s, r) in slopes.items()]
    (down, straight_down), (up, straight_up) = slopes["radius 0.9"], slopes["radius 1.5"]
    kept, lost = trained["clipped"], trained["not clipped"]
    checks = [
        Check(
            "radius 0.9: a straight line down, by log10 0.9 = -0.046 a step",
            f"slope {down:.3f}, r² {straight_down:.3f}",
            abs(down - math.log10(0.9)) < 0.002 and straight_down > 0.99,
        ),
        Check(
            "radius 1.5: a straight line up, by log10 1.5 = 0.176 a step",
            f"slope {up:.3f}, r² {straight_up:.3f}",
            abs(up - math.log10(1.5)) < 0.002 and straight_up > 0.99,
        ),
        Check("clipped training goes on to the end and learns", kept.told(), not kept.stopped and kept.learned),
        Check(
            "unclipped it comes to no number; the guard names it, weights stay numbers",
            lost.told(),
            bool(lost.stopped) and lost.finite,
        ),
    ]
    plots = [
        Plot("steps between", "‖∂h_T/∂h_1‖", norms, "gradients through time", "y"),
        Plot("step", "loss", {name: list(enumerate(t.losses)) for name, t in trained.items()}, "training", "y"),
    ]
    return Findings(table, checks, plots)


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    stopped: str  # what the guard said
    finite: bool  # are all weights numbers afterwards?

    @property
    def learned(self) -> bool:
        return self.losses[-1] < 0.5 * self.losses[0]

    def told(self) -> str:
        return f"stopped at step {len(self.losses)}: {self.stopped}" if self.stopped else f"loss {self.losses[-1]:.4f}"


def gradient(radius: float, distance: int, seed: int) -> float:
    """‖∂h_T/∂h_1‖ as autograd has it: the same inputs and weights for every distance."""
    torch.manual_seed(seed)
    network = turning(RNN(), radius).double()
    h = torch.zeros(1, WIDTH, dtype=torch.float64, requires_grad=True)

    def last(h: Tensor) -> Tensor:
        for _ in range(distance):
            (h,) = network.step(torch.zeros(1, WIDTH, dtype=torch.float64), h)
        return h[0]

    jacobian = torch.autograd.functional.jacobian(last, h)
    assert isinstance(jacobian, Tensor)
    return torch.linalg.matrix_norm(jacobian.squeeze(1), 2).item()


def turning(spec: RNN, radius: float) -> Recurrence:
    """A network whose W_h turns and stretches by the radius."""
    network = spec.recurrence(WIDTH, WIDTH)
    with torch.no_grad():
        network.h_proj.weight.copy_(radius * nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)))
    return network


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Of log10 y over x, by least squares, and r²."""
    x = torch.tensor([p[0] for p in points], dtype=torch.float64)
    y = torch.tensor([p[1] for p in points], dtype=torch.float64).log10()
    x, y = x - x.mean(), y - y.mean()
    rise = (x * y).sum() / (x * x).sum()
    spread = (y * y).sum()
    return rise.item(), 1.0 if spread < 1e-12 else (1 - ((y - rise * x) ** 2).sum() / spread).item()


def train(bench: Bench, clip: float) -> Trained:
    torch.manual_seed(bench.seed)
    length, steps = bench.pick(100, 20), bench.pick(200, 5)
    model = nn.ModuleList([turning(RNN(activation="relu"), 1.3), nn.Linear(WIDTH, 1)])
    optimizer = torch.optim.SGD(model.parameters(), 0.03)
    losses, stopped = [], ""
    for _ in bench.each("training, clipped" if clip else "training, not clipped", range(steps)):
        x = torch.rand(16, length, WIDTH)
        try:
            losses.append(take_step(model, mean_of_row, Batch(x=x), optimizer, clip)["loss"])
        except NonFinite as error:
            stopped = str(error)
            break
    return Trained(losses or [math.inf], stopped, all(bool(p.isfinite().all()) for p in model.parameters()))


def mean_of_row(model: nn.Module, batch: Batch) -> LossResult:
    """The last state should say the mean of the row's first coordinates."""
    network, read = model.children()
    rows, length, _ = batch.x.shape
    said = read(network(batch.x, TokenLayout.whole(rows, length)))[:, -1, 0]
    return (said - batch.x[:, :, 0].mean(1)).square().sum(), torch.tensor(float(len(said))), {}
