"""The learning-rate range test: a short training with a rate that grows exponentially. Smith 2017.

    η_k = lowest · (highest / lowest)^(k / (n - 1))

While the rate is too small, the loss hardly changes. Then it falls, and finally it grows again: training diverges. The
sweep stops if the loss is not finite, or if it has risen by half of its earlier fall, at least by a quarter of the
first loss. The suggested rate is the one at which the loss falls fastest per factor of the rate, but at most a tenth of
the rate at which training diverged. The sweep trains a copy of the model; the model and the loader stay unchanged.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from regard.data.prefetch import StatefulLoader
from regard.spec import require
from regard.training.faults import NonFinite
from regard.training.optimizer import set_learning_rate
from regard.training.recipe import Training
from regard.training.step import autocast, take_step

RUNNING_DECAY = 0.8  # of the mean loss that decides when to stop
KERNEL_STEPS = 3.0  # standard deviation of the weights that smooth the losses after the sweep
MARGIN = 10.0  # between the rate at which training diverges and the largest suggested rate


@dataclass(frozen=True)
class RateSweep:
    rates: list[float]
    losses: list[float]
    diverged: float | None  # the rate at which the sweep stopped; None: it reached its end

    @property
    def smoothed(self) -> list[float]:
        """The losses as weighted means of their neighbours on both sides, without the delay of a running mean."""
        means = []
        for center in range(len(self.losses)):
            weights = [math.exp(-0.5 * ((i - center) / KERNEL_STEPS) ** 2) for i in range(len(self.losses))]
            means.append(sum(w * loss for w, loss in zip(weights, self.losses, strict=True)) / sum(weights))
        return means

    @property
    def steepest(self) -> float:
        """The rate at which the smoothed loss falls fastest over the logarithm of the rate."""
        smoothed = self.smoothed
        slopes = [later - earlier for earlier, later in zip(smoothed, smoothed[2:], strict=False)]
        return self.rates[1 + slopes.index(min(slopes))]

    @property
    def suggestion(self) -> float:
        limit = self.steepest if self.diverged is None else self.diverged / MARGIN
        return float(f"{min(self.steepest, limit):.1e}")


def sweep_learning_rate(
    model: nn.Module,
    loader: StatefulLoader,
    objective: Callable,
    settings: Training,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
    stepped: Callable[[int, float, float], object] = lambda step, rate, loss: None,
) -> RateSweep:
    """Train a copy of the model for `steps` steps with rates from `lowest` to `highest`.

    stepped: called with the step, its rate and its loss.
    """
    require(0 < lowest < highest, f"lowest={lowest} and highest={highest}: rates must satisfy 0 < lowest < highest")
    require(steps >= 10, f"steps={steps} is too few to find a slope; use 10 or more, usually 100")
    device, position = next(model.parameters()).device, loader.state_dict()
    model = copy.deepcopy(model).train()
    optimizer, precision = settings.build_optimizer(model), autocast(settings.precision, device)
    rates, losses, mean = [], [], RunningMean()
    diverged = None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        for step, batch in zip(range(steps), loader, strict=False):
            rate = lowest * (highest / lowest) ** (step / (steps - 1))
            set_learning_rate(optimizer, rate)
            try:
                loss = take_step(
                    model, objective, batch.to(device), optimizer, settings.clip, settings.accumulate, precision
                )["loss"]
            except NonFinite:
                diverged = rate
                break
            rates.append(rate)
            losses.append(loss)
            stepped(step, rate, loss)
            if mean.add(loss):
                diverged = rate
                break
    loader.load_state_dict(position)
    require(len(losses) > 2, f"training diverged at once, at the rate {diverged}; lower `lowest`, or check the data")
    return RateSweep(rates, losses, diverged)


class RunningMean:
    """A running mean of the losses, which detects divergence."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0
        self.means: list[float] = []

    def add(self, loss: float) -> bool:
        """Add a loss; returns whether the mean has risen too far above its minimum."""
        self.total = RUNNING_DECAY * self.total + (1 - RUNNING_DECAY) * loss
        self.weight = RUNNING_DECAY * self.weight + (1 - RUNNING_DECAY)
        self.means.append(self.total / self.weight)
        first, least = self.means[0], min(self.means)
        return self.means[-1] - least > max((first - least) / 2, abs(first) / 4)


def table_rows(sweep: RateSweep, count: int = 12) -> list[tuple[float, float]]:
    """About `count` pairs of rate and smoothed loss, evenly spaced, the last one included."""
    pairs: Sequence[tuple[float, float]] = list(zip(sweep.rates, sweep.smoothed, strict=True))
    stride = max(1, len(pairs) // count)
    return list(reversed(pairs[::-1][::stride]))
