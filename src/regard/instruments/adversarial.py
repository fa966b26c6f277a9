"""Generative adversarial networks: a small one that is trained while the page is open, and the best discriminator of
two densities.

    V(D, G) = E log D(x) + E log(1 - D(G(z)))          D* = p_data / (p_data + p_G)          V(D*, G) = -log 4 + 2 JSD

Goodfellow et al. 2014. Samples whose density equals that of the data leave the best discriminator a coin: D* = ½,
JSD = 0. If the densities do not overlap, D* is always right and JSD = ln 2, however far apart they are.
"""

from fnmatch import fnmatch
from functools import cache, lru_cache
from math import log, pi
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.sources.points import PlanePoints
from regard.evals.samples import covered_modes
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider
from regard.instruments.panels import diagram, heatmap, lines, numbers, scatter
from regard.models.generative.base import MLP
from regard.models.generative.gan import GAN, GANModule
from regard.models.heads import Dense
from regard.objectives.distillation import divergence
from regard.objectives.gan import Adversarial

DENSITIES = {
    "one blob": PlanePoints(modes=1, noise=0.3),
    "two blobs": PlanePoints(modes=2, noise=0.3),
    "ring of 8": PlanePoints(modes=8, noise=0.15),
}
NEAR = 3  # standard deviations of a mode, within which a sample is near it
SPEC = GAN((2,), 2, generator=MLP((32, 32), Dense("relu")), discriminator=MLP((32, 32), Dense("tanh")))
LOSSES = ("non_saturating", "saturating")
RATE, DECAY, ROWS, POOL, HELD_OUT = 5e-3, 0.99, 128, 512, 256
EVERY, RECORDS = 10, 50  # steps between two records; the most records after the first
REACH, CELLS = 3.0, 21  # of the plane from its centre; cells per side of the map of D
DRAWN = 150  # points of the data, and samples


class GameRecord(NamedTuple):
    """The state after some steps, measured on examples that training does not see."""

    samples: Tensor  # (N, 2)
    field: Tensor  # (CELLS, CELLS), D on the plane, the largest y first
    accuracy: float  # of D
    value: float  # V(D, G)
    real: float  # mean of D(x)
    fake: float  # mean of D(G(z))
    slopes: dict[str, float]  # norm of the gradient that each network gets in its phase


@cache
def examples(density: str) -> Tensor:
    """(POOL + HELD_OUT, 2)"""
    source = DENSITIES[density].open().train
    return torch.from_numpy(np.stack([source.example(i)["point"] for i in range(POOL + HELD_OUT)]))


@cache
def plane() -> Tensor:
    """(CELLS², 2), row by row from the top."""
    line = torch.linspace(-REACH, REACH, CELLS, dtype=torch.float64)
    return torch.stack(torch.meshgrid(line, line.flip(0), indexing="xy"), -1).flatten(0, 1)


class AdversarialGame:
    """A GAN, trained as far as it was asked for. The first `head_start` steps train the discriminator alone; then the
    phases of the objective alternate."""

    def __init__(self, density: str, loss: str, head_start: int, seed: int):
        self.data, self.held_out = examples(density).split([POOL, HELD_OUT])
        self.objective = Adversarial(loss=loss)  # ty: ignore[invalid-argument-type]
        self.model: GANModule = SPEC.build(seed).double()
        self.generator = torch.Generator().manual_seed(seed)
        self.noise = self.draw_noise(HELD_OUT)
        self.squares = {parameter: torch.zeros_like(parameter) for parameter in self.model.parameters()}
        self.head_start, self.steps = head_start, 0
        self.records: list[GameRecord] = []
        self.lock = Lock()

    def until(self, count: int) -> list[GameRecord]:
        """The first records, up to this one."""
        with self.lock, torch.enable_grad():
            while len(self.records) <= count:
                while self.steps < len(self.records) * EVERY:
                    self.step()
                self.records.append(self.record())
            return self.records[: count + 1]

    def draw_noise(self, rows: int) -> Tensor:
        return torch.randn(rows, SPEC.latent, generator=self.generator, dtype=torch.float64)

    def gradients(self, number: int, batch: Batch) -> tuple[str, dict[nn.Parameter, Tensor]]:
        """What the phase of this step trains, and the gradients of its parameters."""
        phase = self.objective.phase(number)
        parameters = [p for name, p in self.model.named_parameters() if fnmatch(name, phase.trains)]
        loss, count, _ = phase.loss(self.model, batch)
        return phase.trains, dict(zip(parameters, torch.autograd.grad(loss / count, parameters), strict=True))

    def step(self) -> None:
        """One step of RMSProp. It has no momentum, with which the two networks would circle around each other."""
        chosen = torch.randint(POOL, (ROWS,), generator=self.generator)
        batch = Batch(data=self.data[chosen], noise=self.draw_noise(ROWS))
        _, gradients = self.gradients(max(0, self.steps - self.head_start), batch)
        with torch.no_grad():
            for parameter, gradient in gradients.items():
                square = self.squares[parameter].mul_(DECAY).addcmul_(gradient, gradient, value=1 - DECAY)
                parameter.addcdiv_(gradient, square.sqrt().add_(1e-8), value=-RATE)
        self.steps += 1

    def record(self) -> GameRecord:
        batch, slopes = Batch(data=self.held_out, noise=self.noise), {}
        for phase in (0, 1):
            trained, gradients = self.gradients(phase, batch)
            slopes[trained.partition(".")[0]] = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
        with torch.no_grad():
            loss, count, metrics = self.objective(self.model, batch)
            samples = self.model.decode(self.noise)
            real, fake, field = (self.model.score(x).sigmoid() for x in (self.held_out, samples, plane()))
        return GameRecord(
            samples, field.unflatten(0, (CELLS, CELLS)), float(metrics["discriminator_accuracy"] / count),
            float(-loss / count), float(real.mean()), float(fake.mean()), slopes,
        )  # fmt: skip


game = lru_cache(maxsize=8)(AdversarialGame)


def flow_panel(now: GameRecord, trained: str) -> Panel:
    """The two phases: which network is trained, and how long its gradient is; the other one is frozen."""
    other = {"discriminator": "generator", "generator": "discriminator"}[trained]
    slopes = {trained: now.slopes[trained], other: 0.0}
    nodes = [
        {"id": "z", "label": "noise z", "x": 0.0, "y": 0.25},
        {"id": "G", "label": "G", "x": 0.33, "y": 0.25, "value": slopes["generator"]},
        {"id": "fake", "label": "sample", "x": 0.66, "y": 0.25, "value": now.fake},
        {"id": "real", "label": "data x", "x": 0.66, "y": 0.85, "value": now.real},
        {"id": "D", "label": "D", "x": 1.0, "y": 0.55, "value": slopes["discriminator"]},
    ]
    reads_data = trained == "discriminator"
    edges = [("z", "G", 1.0), ("G", "fake", 1.0), ("fake", "D", 1.0), ("real", "D", float(reads_data))]
    title = f"{trained} trained, {other} frozen; G and D: length of the gradient; data and sample: mean of D"
    return diagram(title, nodes, edges if reads_data else edges[:-1])


def train_gan(density: str, loss: str, head_start: int, seed: int, ticks: int, phase: str) -> list[Panel]:
    records = game(density, loss, head_start * EVERY, seed).until(ticks)
    now, centers = records[-1], torch.from_numpy(DENSITIES[density].centers())
    coverage = covered_modes(now.samples, centers, NEAR * DENSITIES[density].noise)
    inside = [(x, y, "") for x, y in now.samples[:DRAWN].tolist() if max(abs(x), abs(y)) <= REACH]
    data = [(x, y, "") for x, y in examples(density)[POOL : POOL + DRAWN].tolist()]
    outside = DRAWN - len(inside)
    title = f"data and samples after {ticks * EVERY} steps" + f"; {outside} samples are outside" * (outside > 0)
    axis = [f"{REACH * (2 * i / (CELLS - 1) - 1):.1f}" for i in range(CELLS)]
    last, marks = EVERY * RECORDS, {"G is trained": EVERY * head_start}
    return [
        scatter(title, data + inside, ["data"] * len(data) + ["samples"] * len(inside), reach=REACH),
        lines(
            "accuracy of D: right answers on new data and samples",
            {"accuracy": [(i * EVERY, r.accuracy) for i, r in enumerate(records)], "a coin": [(0, 0.5), (last, 0.5)]},
            "step", "share", marks=marks,
        ),
        heatmap("D(x): how probable D finds it that x is data", now.field, axis[::-1], axis, shows_numbers=False),
        flow_panel(now, phase),
        lines(
            "the value V(D, G)",
            {
                "V(D, G)": [(i * EVERY, r.value) for i, r in enumerate(records)],
                "−log 4": [(0, -log(4)), (last, -log(4))],
            },
            "step", "V", marks=marks, from_zero=False,
        ),
        numbers(
            {
                "accuracy of D": now.accuracy,
                "mean accuracy of the last 5 points": sum(r.accuracy for r in records[-5:]) / len(records[-5:]),
                "V(D, G)": now.value,
                "modes of the data with samples": f"{coverage.modes} of {len(centers)}",
                "share of samples near a mode": coverage.share,
                "weights of G and D": f"{sum(p.numel() for p in SPEC.build(0).parameters()):,}",
            }
        ),
    ]  # fmt: skip


GRID = torch.linspace(-10, 20, 3001, dtype=torch.float64)
LEFT, RIGHT, FARTHEST = -4.5, 12.0, 8.0  # of the plots; of the distance
NEVER = -1e4  # the logarithm of a density of zero: its exponential is 0, and differences are finite
QUANTILES = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000


class Density(NamedTuple):
    """A normal or uniform density. The width of a uniform one is √12 of its standard deviations."""

    shape: str
    mean: float
    deviation: float

    def log(self, x: Tensor) -> Tensor:
        place = (x - self.mean) / self.deviation
        if self.shape == "normal":
            return -place.square() / 2 - log(self.deviation * (2 * pi) ** 0.5)
        inside = place.abs() <= 3**0.5
        return torch.where(inside, x.new_tensor(-log(12**0.5 * self.deviation)), NEVER)

    def quantiles(self, shares: Tensor) -> Tensor:
        unit = torch.special.ndtri(shares) if self.shape == "normal" else (2 * shares - 1) * 3**0.5
        return self.mean + self.deviation * unit


def jensen_shannon(p: Density, q: Density) -> float:
    """In nats: that of the distributions over the points of the grid."""
    return float(divergence(p.log(GRID), q.log(GRID), beta=0.5).clamp_min(0.0))  # not -1e-17


class Samples(NamedTuple):
    """Samples of a fixed density, with the best discriminator, for the objective."""

    data: Density
    generated: Density

    def decode(self, noise: Tensor) -> Tensor:
        return self.generated.quantiles(noise)

    def score(self, x: Tensor) -> Tensor:
        return self.data.log(x) - self.generated.log(x)


@cache
def divergence_curve(shape: str, deviation: float) -> list[tuple[float, float]]:
    data, distances = Density(shape, 0.0, 1.0), torch.linspace(0, FARTHEST, 41).tolist()
    return [(d, jensen_shannon(data, Density(shape, d, deviation))) for d in distances]


def best_discriminator(shape: str, distance: float, deviation: float) -> list[Panel]:
    data, generated = Density(shape, 0.0, 1.0), Density(shape, distance, deviation)
    p, q = (density.log(GRID).exp() for density in (data, generated))
    best = Samples(data, generated)
    found = jensen_shannon(data, generated)
    below, above = (jensen_shannon(data, generated._replace(mean=distance + d)) for d in (-0.05, 0.05))
    batch = Batch(data=data.quantiles(QUANTILES), noise=QUANTILES)
    loss, count, metrics = Adversarial()(best, batch)  # ty: ignore[invalid-argument-type]
    shown = ((GRID >= LEFT) & (GRID <= RIGHT)).nonzero().flatten()[::5].tolist()

    def curve(values: Tensor) -> list[tuple[float, float]]:
        return [(float(GRID[i]), float(values[i])) for i in shown]

    return [
        lines("densities", {"data": curve(p), "samples": curve(q)}, "x", "density"),
        lines(
            "the best discriminator",
            {"D*(x)": curve(best.score(GRID).sigmoid()), "a coin": [(LEFT, 0.5), (RIGHT, 0.5)]},
            "x", "probability of data", top=1.0,
        ),
        lines(
            "divergence as the samples move",
            {"JSD": divergence_curve(shape, deviation), "ln 2": [(0.0, log(2)), (FARTHEST, log(2))]},
            "distance of the means", "nats", marks={"here": distance},
        ),
        numbers(
            {
                "JSD, nats": found,
                "JSD, bits": found / log(2),
                "slope of the JSD with the distance": round((above - below) / 0.1, 9),
                "−log 4 + 2 JSD": round(2 * found - log(4), 9),
                "V(D*, G) of 4,000 samples": 0.0 - float(loss / count),
                "accuracy of D*": float(metrics["discriminator_accuracy"] / count),
            }
        ),
    ]  # fmt: skip


INSTRUMENTS = (
    Instrument(
        "adversarial-training", "A game of two networks",
        "G turns noise into samples, D tells them from data; in turns, one is trained and the other frozen. Some seeds "
        "lose a blob.",
        r"\min_G \max_D V(D, G), \qquad V = \mathbb{E}_{x \sim p_{\text{data}}} \log D(x) + "
        r"\mathbb{E}_{z \sim \mathcal{N}(0, I)} \log\bigl(1 - D(G(z))\bigr)",
        (
            Slider("ticks", "steps", 0, RECORDS, 40, names=tuple(str(EVERY * i) for i in range(RECORDS + 1))),
            Selection("density", "data", tuple(DENSITIES), "two blobs"),
            Selection("loss", "loss of G", LOSSES, LOSSES[0]),
            Slider("head_start", "steps of D alone, at first", 0, 10, 4,
                   names=tuple(str(EVERY * i) for i in range(11))),
            Slider("seed", "seed", 0, 9, 0),
            Selection("phase", "phase of the drawing", ("discriminator", "generator"), "discriminator"),
        ),
        Quiz(
            "D alone is right in more than 9 of 10 cases. How often is it right once G is trained, too?",
            "It falls to about half of them, a coin: samples lie where the data are, and V is near −log 4 = −1.386. "
            "With two blobs, some seeds lose one of them; D then stays at 3 of 4.",
            {"ticks": RECORDS, "density": "one blob", "loss": LOSSES[0], "head_start": 4},
        ),
        train_gan, ("models/generative/gan.py", "objectives/gan.py", "data/sources/points.py", "evals/samples.py"),
    ),
    Instrument(
        "best-discriminator", "The best discriminator",
        "For fixed samples the best D is the share of the data in the density; its value measures how far both are "
        "apart.",
        r"D^*(x) = \frac{p_{\text{data}}(x)}{p_{\text{data}}(x) + p_G(x)}, \qquad "
        r"V(D^*, G) = -\log 4 + 2\,\mathrm{JSD}(p_{\text{data}}, p_G)",
        (
            Slider("distance", "distance of the means", 0.0, FARTHEST, 3.82, 0.01),
            Slider("deviation", "width of the samples", 0.5, 2.0, 1.0, 0.05),
            Selection("shape", "densities", ("normal", "uniform"), "normal"),
        ),
        Quiz(
            "The densities do not overlap. How large is the divergence, and which way does it push the samples?",
            "ln 2 = 0.693 nats, one bit, at any distance: its slope is 0, so it pushes them nowhere. D is always "
            "right, and G learns nothing from it.",
            {"distance": 6.0, "deviation": 1.0, "shape": "uniform"},
        ),
        best_discriminator, ("objectives/gan.py", "objectives/distillation.py"),
    ),
)  # fmt: skip
