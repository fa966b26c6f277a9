"""Random codes of an autoencoder decode to rubbish; the pulls of a VAE fill the holes; β → 0 brings them back.

An autoencoder and VAEs with weights β of the KL, of handwritten digits, with codes of 8 numbers. The reconstruction
error is smallest with sharp, separate codes; the KL is zero if all of them are N(0, I).

Random codes of a VAE are drawn from N(0, I), as in its generation. An autoencoder has no such distribution: its random
codes are normal with the mean and the deviation of each number of the codes of the training images; those of N(0, I)
are in the table. Decoded codes are judged twice: a classifier that was trained on real digits gives one label a
probability of at least 0.9 (recognized); and the nearest training image is no farther than for 95 % of held-out digits
(near a digit).
"""

# ledger: ae.holes vae.pulls

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.data.sources.images import LabelledImages
from regard.evals.samples import recognized, reconstruct, share_near, unexplained
from regard.labs.digit_models import (
    classifier_accuracy,
    read_digits,
    train_autoencoder,
    train_classifier,
    train_vae,
)
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator
from regard.models.generative.autoencoder import AutoencoderModule
from regard.models.generative.vae import VAEModule
from regard.objectives.reconstruction import gaussian_kl

LATENT = 8
BETAS = (1e-4, 1e-2, 0.1, 0.8, 4.0, 20.0)


def run(bench: Bench) -> Findings:
    digits, held_out = read_digits(bench)
    judge = SampleJudge(train_classifier(bench, digits), digits, held_out)
    steps, betas = bench.training(3000, 2), bench.setting(BETAS, (1e-4, 0.8, 20.0))
    noise = torch.randn(bench.setting(1000, 20), LATENT, generator=generator(bench.seed))
    plain = judge.examine(train_autoencoder(bench, digits, LATENT, steps), noise)
    variational = {beta: judge.examine(train_vae(bench, digits, LATENT, beta, steps), noise) for beta in betas}

    def line(name: str) -> list[float]:
        return [row[name] for row in variational.values()]

    def points(name: str) -> list[tuple[float, float]]:
        return list(zip(betas, line(name), strict=True))

    errors, divergences, shares = line("unexplained"), line("KL"), line("random codes recognized")
    best = max(range(len(betas)), key=shares.__getitem__)
    checks = [
        Check("an autoencoder reconstructs: at least 0.8 of its reconstructions of held-out digits are recognized",
              f"{plain['reconstructions recognized']:.3f}", plain["reconstructions recognized"] >= 0.8),
        Check("its random codes decode to rubbish: at most half as many are recognized",
              f"{plain['random codes recognized']:.3f}",
              2 * plain["random codes recognized"] <= plain["reconstructions recognized"]),
        Check("and at most half as many are near a digit",
              f"{plain['random codes near a digit']:.3f} and {plain['near a digit']:.3f}",
              2 * plain["random codes near a digit"] <= plain["near a digit"]),
        Check("random codes of the best VAE are recognized more often than those of the autoencoder, by 0.2",
              f"{shares[best]:.3f} with β {betas[best]:g}", shares[best] >= plain["random codes recognized"] + 0.2),
        Check("β trades: with every larger β the error is larger and the KL smaller",
              f"{', '.join(f'{e:.3f}' for e in errors)} and {', '.join(f'{d:.2f}' for d in divergences)}",
              errors == sorted(errors) and divergences == sorted(divergences, reverse=True)),
        Check("the reconstruction alone wants sharp codes: with the smallest β, σ is below a tenth of the spread of μ",
              f"{line('width σ')[0]:.4f} and {line('spread of μ')[0]:.2f}",
              line("width σ")[0] < line("spread of μ")[0] / 10),
        Check("the KL wants wide ones in the centre: with the largest β, σ is above 0.9 and the spread of μ below 0.3",
              f"{line('width σ')[-1]:.3f} and {line('spread of μ')[-1]:.3f}",
              line("width σ")[-1] > 0.9 and line("spread of μ")[-1] < 0.3),
        Check("the smallest β brings the holes back: fewer of its random codes are recognized than of the best, by 0.2",
              f"{shares[0]:.3f} and {shares[best]:.3f}", shares[0] <= shares[best] - 0.2),
        Check("too large a β loses the digits: fewer are recognized than of the best, by 0.2",
              f"{shares[-1]:.3f} and {shares[best]:.3f}", shares[-1] <= shares[best] - 0.2),
    ]  # fmt: skip
    table = [{"model": "autoencoder", "β": "", "KL": "", "width σ": ""} | plain]
    table += [{"model": "VAE", "β": beta} | row for beta, row in variational.items()]
    names = ("random codes recognized", "random codes near a digit", "reconstructions recognized")
    plots = [
        Plot("β", "nats, or share", {
            "KL / 10, nats": [(beta, divergence / 10) for beta, divergence in points("KL")],
            "variance unexplained": points("unexplained"),
            "mean σ": points("width σ"),
        }, "the two pulls", "x"),
        Plot("β", "share", {name: points(name) for name in names} | {
            "autoencoder, random codes recognized": [(beta, plain[names[0]]) for beta in betas],
        }, "decoded codes", "x"),
    ]  # fmt: skip
    remark = f"{steps:,} steps of 64 images. The last column is the classifier's accuracy on held-out digits."
    accuracy = {"classifier": classifier_accuracy(judge.classifier, held_out)}
    return Findings([row | accuracy for row in table], checks, plots, remark)


class SampleJudge(NamedTuple):
    classifier: nn.Module
    digits: LabelledImages
    held_out: LabelledImages

    @torch.no_grad()
    def examine(self, model: AutoencoderModule | VAEModule, noise: Tensor) -> dict[str, float]:
        codes, images = model.encode(self.digits.images), self.held_out.images
        standard, fitted = model.decode(noise), model.decode(codes.mean(0) + codes.std(0) * noise)
        rebuilt, drawn = reconstruct(model, images), standard if isinstance(model, VAEModule) else fitted
        row = {
            "unexplained": unexplained(rebuilt, images),
            "spread of μ": float(codes.std(0).mean()),
            "reconstructions recognized": recognized(self.classifier, rebuilt).share,
            "near a digit": share_near(rebuilt, self.digits.images, images),
            "random codes recognized": recognized(self.classifier, drawn).share,
            "random codes near a digit": share_near(drawn, self.digits.images, images),
            "codes of N(0, I) recognized": recognized(self.classifier, standard).share,
            "codes with fitted moments recognized": recognized(self.classifier, fitted).share,
        }
        if isinstance(model, VAEModule):
            mean, log_variance = model.posterior(images)
            divergence, width = gaussian_kl(mean, log_variance).mean(), (log_variance / 2).exp().mean()
            row = {"KL": float(divergence), "width σ": float(width)} | row
        return row
