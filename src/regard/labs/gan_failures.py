"""GANs fail in known ways: realistic samples of few modes, circling in place of settling, and a D too strong to teach.

The data are a ring of eight narrow clusters. A plain GAN with momentum, whose G learns ten times as fast as D (as in
Metz et al. 2017), is measured every few steps; so is one with the Wasserstein loss and a gradient penalty (Gulrajani
et al. 2017), which is meant as a cure. Samples are realistic if they are within 0.45 of the center of a cluster, and a
cluster is covered if so many of them are near it as a tenth of its equal share. How much samples move is the total
variation between the shares of the clusters in consecutive measurements: 0 if they stay, 1 if all have moved.

In the last part, the discriminator is trained alone for longer and longer against a new generator, whose gradient is
then measured with both losses.
"""

# ledger: gan.collapse gan.unstable

import torch
from torch.nn.utils import get_total_norm

from regard.data.batch import Batch
from regard.data.sources.points import PlanePoints
from regard.labs.experiment import Bench, Check, Findings, Plot, Point
from regard.labs.fit import generator
from regard.labs.point_games import ROWS, Measurement, Rules, modes_of, play
from regard.models.generative.base import MLP
from regard.models.generative.gan import GAN
from regard.models.heads import Dense
from regard.objectives.gan import Adversarial

DATA = modes_of(PlanePoints(modes=8, noise=0.15))
NET = MLP((128, 128), Dense("relu"))
SPEC = GAN((2,), 16, generator=NET, discriminator=NET)
LOSSES = ("saturating", "non_saturating")


def run(bench: Bench) -> Findings:
    steps, fewer = bench.training(3000, 4), bench.training(1000, 4)
    critic = Adversarial(loss="wasserstein", critic_steps=5, penalty=1.0)
    games = {
        "plain": Rules(steps, critic_rate=1e-4, every=max(1, steps // 20)),
        "Wasserstein": Rules(fewer, critic, momentum=0.0, every=max(1, fewer // 20)),
    }
    histories = {name: play(bench, name, SPEC.build(bench.seed), DATA, rules) for name, rules in games.items()}
    plain, cured = (history[len(history) // 2 :] for history in histories.values())
    collapsed = sum(m.near >= 0.8 and m.covered <= 4 for m in plain) / len(plain)
    move_plain, move_cured = moves(plain), moves(cured)
    settled = sum(abs(m.accuracy - 0.5) <= 0.1 for m in plain) / len(plain)
    slopes = {loss: slopes_of(bench, loss, bench.setting((0, 10, 30, 100, 300, 1000), (0, 2))) for loss in LOSSES}
    falls = {loss: line[0][1] / max(line[-1][1], 1e-30) for loss, line in slopes.items()}
    checks = [
        Check("mode collapse: in half of the measurements of the second half, the plain GAN covers at most 4 of 8 "
              "clusters with at least 0.8 of its samples in clusters",
              f"in {collapsed:.2f}; at the end {ending(plain)}",
              collapsed >= 0.5),
        Check("no settling: its samples move to other clusters, at least 0.3 of them between two measurements",
              f"{move_plain:.3f}", move_plain >= 0.3),
        Check("nor does its D become a coin: right in 0.4 to 0.6 in at most half of them", f"{settled:.2f}",
              settled <= 0.5),
        Check("the Wasserstein loss with gradient penalty covers all 8 clusters at the end", ending(cured),
              cured[-1].covered == 8),
        Check("and its samples move less, by a factor of 3", f"{move_cured:.3f}", 3 * move_cured <= move_plain),
        Check("the longer D is trained alone, the smaller is the gradient of G with the saturating loss: by 10 or more",
              f"{falls['saturating']:.3g}", falls["saturating"] >= 10),
        Check("but not with the other loss: by less than 3", f"{falls['non_saturating']:.3g}",
              falls["non_saturating"] < 3),
    ]  # fmt: skip
    table = [
        {"game": name, "clusters covered": history[-1].covered, "samples in clusters": history[-1].near,
         "samples that move": moves(history[len(history) // 2 :]), "energy distance": history[-1].distance,
         "smallest distance": min(m.distance for m in history)}
        for name, history in histories.items()
    ]  # fmt: skip
    plots = [
        Plot("share of the training", "clusters covered", {
            name: [(m.step / history[-1].step, m.covered) for m in history] for name, history in histories.items()}),
        Plot("share of the training", "energy distance", {
            name: [(m.step / history[-1].step, max(m.distance, 1e-4)) for m in history]
            for name, history in histories.items()
        }, log="y"),
        Plot("steps of D alone", "gradient of G", {
            loss.replace("_", "-"): line[1:] for loss, line in slopes.items()}, log="xy"),
    ]  # fmt: skip
    remark = f"{steps:,} steps of the generator, and {fewer:,} with five critic steps each; {ROWS} points per step."
    return Findings(table, checks, plots, remark)


def ending(history: list[Measurement]) -> str:
    return f"{history[-1].covered} of 8, {history[-1].near:.2f} in clusters"


def moves(history: list[Measurement]) -> float:
    """The mean total variation between consecutive measurements."""
    variations = [(a.shares - b.shares).abs().sum() / 2 for a, b in zip(history, history[1:], strict=False)]
    return float(torch.stack(variations).mean()) if variations else 0.0


def slopes_of(bench: Bench, loss: str, counts: tuple[int, ...]) -> list[Point]:
    """The norm of the gradient of a new generator, after so many steps of the discriminator alone."""
    model = SPEC.build(bench.seed)
    objective = Adversarial(loss=loss)  # ty: ignore[invalid-argument-type]
    optimizer = torch.optim.Adam(model.discriminator.parameters(), 1e-3, (0.5, 0.99))
    rng, points = generator(bench.seed), []
    for step in bench.each(f"D alone, {loss}", range(max(counts) + 1)):
        noise = torch.randn(ROWS, SPEC.latent, generator=rng)
        if step in counts:
            value, count, _ = objective.generator_loss(model, Batch(noise=noise))
            gradients = torch.autograd.grad(value / count, list(model.generator.parameters()))
            points.append((step, float(get_total_norm(gradients))))
        value, count, _ = objective.discriminator_loss(model, Batch(data=DATA.draw(rng, ROWS), noise=noise))
        optimizer.zero_grad()
        (value / count).backward()
        optimizer.step()
    return points
