"""A GAN has succeeded when its discriminator is right half of the time, not when a network wins.

GANs learn four round clusters in the plane. The discriminator is trained alone at first, then both in turn: evenly, at
a low rate; with a discriminator that is too strong (five steps per step of the generator, of which it gets half as
many, and the saturating loss); or with one that hardly learns (its rate divided by 1,000). Measured are the accuracy of
D on new points and samples, and the energy distance of both. Because a weak D is also right half of the time, a new D
is trained on the final samples of every GAN: the best D is right half of the time only if the densities are equal
(Goodfellow et al. 2014).
"""

# ledger: gan.stalemate

import math

import torch

from regard.data.sources.points import PlanePoints
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.point_games import Measurement, Rules, fresh_accuracy, modes_of, play
from regard.models.generative.base import MLP
from regard.models.generative.gan import GAN
from regard.models.heads import Dense
from regard.objectives.gan import Adversarial

DATA = modes_of(PlanePoints(density="grid", modes=4, noise=0.4))
SPEC = GAN((2,), 4, generator=MLP((128, 128), Dense("relu")), discriminator=MLP((128, 128), Dense("silu")))
HEAD_START = 300


def run(bench: Bench) -> Findings:
    steps, fewer, head_start = bench.training(4000, 4), bench.training(2000, 4), bench.setting(HEAD_START, 4)
    strong = Adversarial(loss="saturating", critic_steps=5)
    games = {
        "even": Rules(
            steps, rate=2e-4, critic_rate=2e-4, momentum=0.0, head_start=head_start, every=max(1, steps // 20)
        ),
        "strong D": Rules(max(1, fewer // 2), strong, head_start=head_start, every=max(1, fewer // 40)),
        "weak D": Rules(fewer, critic_rate=1e-6, head_start=head_start, every=max(1, fewer // 20)),
    }
    histories, fresh = {}, {}
    for name, rules in games.items():
        model = SPEC.build(bench.seed)
        histories[name] = play(bench, name, model, DATA, rules)
        fresh[name] = fresh_accuracy(bench, f"{name}, a new D", model, DATA, bench.training(1000, 2))
    even, winning, weak = histories.values()
    relation = rank_correlation([m.accuracy for m in even], [m.distance for m in even])
    checks = [
        Check("a D that is trained alone is right in at least 0.95 of the cases", f"{even[0].accuracy:.3f}",
              even[0].accuracy >= 0.95),
        Check("with both trained evenly it falls to a half, within 0.1", f"{late(even, 'accuracy'):.3f}",
              abs(late(even, "accuracy") - 0.5) <= 0.1),
        Check("V is then -log 4 = -1.386, within 0.15", f"{late(even, 'value'):.3f}",
              abs(late(even, "value") + math.log(4)) <= 0.15),
        Check("and the samples are like the data: a new D is right in at most 0.65", f"{fresh['even']:.3f}",
              fresh["even"] <= 0.65),
        Check("on the way, accuracy and distance fall together: their rank correlation is at least 0.5",
              f"{relation:.2f}", relation >= 0.5),
        Check("a D that wins is no success: right in at least 0.9, with five times the distance of the even game",
              f"{late(winning, 'accuracy'):.3f}; {late(winning, 'distance'):.3f} and {late(even, 'distance'):.3f}",
              late(winning, "accuracy") >= 0.9 and late(winning, "distance") >= 5 * late(even, "distance")),
        Check("nor is a D that loses: below 0.6, and a new D is right in at least 0.8",
              f"{late(weak, 'accuracy'):.3f} and {fresh['weak D']:.3f}",
              late(weak, "accuracy") < 0.6 and fresh["weak D"] >= 0.8),
    ]  # fmt: skip
    table = [
        {"game": name, "accuracy of D": late(history, "accuracy"), "accuracy of a new D": fresh[name],
         "V": late(history, "value"), "energy distance": late(history, "distance"),
         "clusters with samples": history[-1].covered, "samples in clusters": history[-1].near}
        for name, history in histories.items()
    ]  # fmt: skip
    plots = [
        Plot("steps of the generator", "accuracy of D", {
            name: [(m.step, m.accuracy) for m in history] for name, history in histories.items()}),
        Plot("steps of the generator", "energy distance", {
            name: [(m.step, max(m.distance, 1e-4)) for m in history] for name, history in histories.items()
        }, log="y"),
    ]  # fmt: skip
    remark = (
        f"{steps:,} steps of the generator in the even game, {fewer:,} with a weak D; most numbers are means over the "
        "last fifth of the measurements."
    )
    return Findings(table, checks, plots, remark)


def late(history: list[Measurement], name: str) -> float:
    """The mean over the last fifth."""
    chosen = history[-max(1, len(history) // 5) :]
    return sum(getattr(m, name) for m in chosen) / len(chosen)


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
