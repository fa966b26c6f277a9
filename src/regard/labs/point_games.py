"""GANs of points in the plane for labs: trained by one Adam per network, and measured on the way."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from regard.data.batch import Batch
from regard.data.sources.points import PlanePoints
from regard.evals.samples import covered_modes
from regard.labs.experiment import Bench
from regard.labs.fit import generator
from regard.models.generative.gan import GANModule
from regard.objectives.gan import Adversarial
from regard.objectives.generative import phase_optimizers, train_phase

ROWS, MEASURED = 128, 1000
NEAR = 3  # standard deviations of a mode, within which a sample is near it


class Modes(NamedTuple):
    """Normal densities with these centers, which are drawn in batches."""

    centers: Tensor  # (M, 2)
    noise: float

    def draw(self, rng: torch.Generator, rows: int) -> Tensor:
        chosen = torch.randint(len(self.centers), (rows,), generator=rng)
        return self.centers[chosen] + self.noise * torch.randn(rows, 2, generator=rng)

    def shares(self, points: Tensor) -> Tensor:
        """The share of the points that are nearest to each center (M,)."""
        return torch.cdist(points, self.centers).argmin(1).bincount(minlength=len(self.centers)) / len(points)


def modes_of(source: PlanePoints) -> Modes:
    return Modes(torch.from_numpy(source.centers()).float(), source.noise)


@dataclass(frozen=True)
class Rules:
    """How two networks are trained against each other. The first `head_start` steps train the discriminator alone."""

    steps: int  # of the generator
    objective: Adversarial = Adversarial()
    rate: float = 1e-3  # of the generator
    critic_rate: float = 1e-3
    momentum: float = 0.5
    head_start: int = 0
    every: int = 100  # steps of the generator between two measurements


class Measurement(NamedTuple):
    step: int  # of the generator
    accuracy: float  # of the discriminator, on new points and samples
    value: float  # V(D, G)
    covered: int  # modes that have samples
    near: float  # share of the samples that are near a mode
    shares: Tensor  # of the samples per mode (M,)
    distance: float  # energy distance of data and samples
    slope: float  # mean norm of the gradients of the generator since the last measurement


def play(bench: Bench, label: str, model: GANModule, data: Modes, rules: Rules) -> list[Measurement]:
    """Train the model in place, and measure it every few steps and at the end."""
    rng, objective = generator(bench.seed), rules.objective
    rates = {"discriminator.*": rules.critic_rate, "generator.*": rules.rate}
    optimizers = phase_optimizers(model, rates, (rules.momentum, 0.99))
    history: list[Measurement] = []
    slopes: list[float] = []
    cycle = objective.critic_steps + 1
    last = rules.steps * cycle
    for step in bench.each(label, range(-rules.head_start, last + 1)):
        if step == last or (step >= 0 and step % (cycle * rules.every) == 0):
            history.append(measure(model, data, bench.seed, step // cycle, slopes))
            slopes = []
        batch = Batch(
            data=data.draw(rng, ROWS),
            noise=torch.randn(ROWS, model.spec.latent, generator=rng),
            mix=torch.rand(ROWS, generator=rng),
        )
        train_phase(model, objective, batch, max(0, step), optimizers)
        if objective.phase(max(0, step)).trains == "generator.*":
            slopes.append(float(get_total_norm([p.grad for p in model.generator.parameters() if p.grad is not None])))
    return history


@torch.no_grad()
def measure(model: GANModule, data: Modes, seed: int, step: int, slopes: list[float]) -> Measurement:
    rng = generator(1000 + seed)
    real, samples = data.draw(rng, MEASURED), draw_samples(model, rng)
    scores, fake = model.score(real), model.score(samples)
    coverage = covered_modes(samples, data.centers, NEAR * data.noise)
    return Measurement(
        step,
        float(((scores > 0).sum() + (fake <= 0).sum()) / (2 * MEASURED)),
        float(F.logsigmoid(scores).mean() + F.logsigmoid(-fake).mean()),
        coverage.modes,
        coverage.share,
        data.shares(samples),
        energy_distance(real, samples),
        sum(slopes) / len(slopes) if slopes else 0.0,
    )


def draw_samples(model: GANModule, rng: torch.Generator, rows: int = MEASURED) -> Tensor:
    return model.decode(torch.randn(rows, model.spec.latent, generator=rng))


def energy_distance(a: Tensor, b: Tensor) -> float:
    """2 E ‖a - b‖ - E ‖a - a'‖ - E ‖b - b'‖: zero if both densities are equal (Székely & Rizzo 2013)."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


def fresh_accuracy(bench: Bench, label: str, model: GANModule, data: Modes, steps: int) -> float:
    """The accuracy of a new discriminator that is trained on fixed samples, measured on others."""
    torch.manual_seed(bench.seed + 1)
    critic: nn.Module = model.spec.discriminator.build(2, 1)
    optimizer, rng = torch.optim.Adam(critic.parameters(), 2e-3), generator(2000 + bench.seed)

    def scores(rows: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            samples = draw_samples(model, rng, rows)
        return critic(data.draw(rng, rows)).squeeze(-1), critic(samples).squeeze(-1)

    for _ in bench.each(label, range(steps)):
        real, fake = scores(ROWS)
        optimizer.zero_grad()
        (F.softplus(-real) + F.softplus(fake)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        real, fake = scores(4 * MEASURED)
    return float(((real > 0).sum() + (fake <= 0).sum()) / (8 * MEASURED))
