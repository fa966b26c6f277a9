"""Autoencoders represent, VAEs generate smoothly and blurred, GANs generate sharply and train unsteadily.

The three models of handwritten digits, with equal networks; codes of 8 numbers, and noise of 32 for the GAN (Goodfellow
et al. 2014; Kingma & Welling 2014). Codes are drawn as in code-holes. Samples are recognized if a classifier that was
trained on real digits gives one label a probability of at least 0.9; a digit is covered if a tenth of its equal share
of the samples is recognized as it.

Sharpness is the mean absolute Laplacian of the images, as a share of that of held-out digits: an average of shifted
images has less of it. For the course of training, ten measurements are taken in its second half, at constant rates and
without averaged weights: the share of recognized reconstructions of the autoencoder, and of recognized samples of the
others.
"""

# ledger: gen.table gan.sharp

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.sources.images import LabelledImages
from regard.evals.samples import recognized, reconstruct, sharpness, unexplained
from regard.labs.digit_models import (
    HIDDEN,
    classifier_accuracy,
    draw_digits,
    probe_accuracy,
    read_digits,
    train_classifier,
)
from regard.labs.experiment import Bench, Check, Findings, Plot, Point
from regard.labs.fit import generator
from regard.models.generative.autoencoder import Autoencoder, AutoencoderModule
from regard.models.generative.base import MLP, Generative
from regard.models.generative.gan import GAN, GANModule
from regard.models.generative.vae import VAE
from regard.objectives.gan import Adversarial
from regard.objectives.generative import GenerativeObjective, phase_optimizers, train_phase
from regard.objectives.reconstruction import Reconstruction, Variational

NET, LATENT, NOISE, ROWS, RATE, MEASURED = MLP(HIDDEN), 8, 32, 256, 1e-3, 10
FAMILIES: dict[str, tuple[Generative[Any], GenerativeObjective, int, float]] = {  # model, objective, steps, momentum
    "autoencoder": (Autoencoder((1, 8, 8), LATENT, "tanh", NET, NET), Reconstruction(), 1000, 0.9),
    "VAE": (VAE((1, 8, 8), LATENT, "tanh", NET, NET), Variational(beta=0.8), 1000, 0.9),
    "GAN": (GAN((1, 8, 8), NOISE, "tanh", NET, NET), Adversarial(), 4000, 0.0),
}


def run(bench: Bench) -> Findings:
    digits, held_out = read_digits(bench)
    classifier = train_classifier(bench, digits)
    count = bench.setting(1000, 20)
    rows, curves = {}, {}
    for name, (spec, objective, full, momentum) in FAMILIES.items():
        steps, model = bench.training(full, 20), spec.build(bench.seed)
        noise = torch.randn(count, spec.latent, generator=generator(bench.seed))
        measure = partial(share_recognized, classifier, model, held_out.images, noise)
        curves[name] = train(bench, name, model, objective, digits, steps, momentum, measure)
        rows[name] = examine(model, classifier, digits, held_out, noise)
        shares = [value for _, value in curves[name]]
        rows[name]["range in training"] = max(shares) - min(shares)
    plain, variational, adversarial = rows.values()
    blur, edge = (abs(row["sharpness"] - 1) for row in (variational, adversarial))
    best = max(variational["samples recognized"], adversarial["samples recognized"])
    checks = [
        Check("the autoencoder leaves less of held-out digits unexplained than the VAE",
              f"{plain['digits, unexplained']:.3f} and {variational['digits, unexplained']:.3f}",
              plain["digits, unexplained"] < variational["digits, unexplained"]),
        Check("a linear classifier reads at least 0.85 of the digits from the codes of both",
              f"{plain['digit read from the code']:.3f} and {variational['digit read from the code']:.3f}",
              min(plain["digit read from the code"], variational["digit read from the code"]) >= 0.85),
        Check("the autoencoder cannot generate: at most half as many samples are recognized as of the best",
              f"{plain['samples recognized']:.3f} and {best:.3f}", 2 * plain["samples recognized"] <= best),
        Check("VAE and GAN can: at least 0.5 of the samples are recognized, of all ten digits",
              f"{variational['samples recognized']:.3f} of {variational['digits covered']} digits; "
              f"{adversarial['samples recognized']:.3f} of {adversarial['digits covered']}",
              min(variational["samples recognized"], adversarial["samples recognized"]) >= 0.5
              and variational["digits covered"] == adversarial["digits covered"] == 10),
        Check("samples of the VAE are blurred: their sharpness is at most 0.9 of that of digits",
              f"{variational['sharpness']:.3f}", variational["sharpness"] <= 0.9),
        Check("that of the GAN's is nearer to that of digits", f"{adversarial['sharpness']:.3f}", edge < blur),
        Check("the GAN trains unsteadily: in the second half its share ranges twice as far as that of the VAE",
              f"{adversarial['range in training']:.3f} and {variational['range in training']:.3f}",
              adversarial["range in training"] >= 2 * variational["range in training"]),
    ]  # fmt: skip
    plots = [
        Plot("share of the training", "recognized", curves, "second half of the training"),
        Plot("", "share", {
            name: [(i, rows[family][name]) for i, family in enumerate(rows)]
            for name in ("samples recognized", "sharpness", "range in training")
        }, groups=list(rows)),
    ]  # fmt: skip
    accuracy = classifier_accuracy(classifier, held_out)
    known = recognized(classifier, held_out.images).share
    table = [
        {"model": name} | row | {"classifier": accuracy, "held-out recognized": known} for name, row in rows.items()
    ]
    remark = "Last columns: the classifier's accuracy on held-out digits, and the share of these that it recognizes."
    return Findings(table, checks, plots, remark)


@torch.no_grad()
def share_recognized(classifier: nn.Module, model: Any, images: Tensor, noise: Tensor) -> float:
    """Of reconstructions of an autoencoder, and of samples of the others."""
    plain = isinstance(model, AutoencoderModule)
    return recognized(classifier, reconstruct(model, images) if plain else model.decode(noise)).share


@torch.no_grad()
def examine(
    model: Any, classifier: nn.Module, digits: LabelledImages, held_out: LabelledImages, noise: Tensor
) -> dict[str, Any]:
    row: dict[str, Any] = {"digits, unexplained": "", "digit read from the code": ""}
    if not isinstance(model, GANModule):
        codes, others = model.encode(digits.images), model.encode(held_out.images)
        row = {
            "digits, unexplained": unexplained(reconstruct(model, held_out.images), held_out.images),
            "digit read from the code": probe_accuracy(codes, digits.labels, others, held_out.labels),
        }
        noise = codes.mean(0) + codes.std(0) * noise if isinstance(model, AutoencoderModule) else noise
    samples = model.decode(noise)
    found = recognized(classifier, samples)
    return row | {
        "samples recognized": found.share,
        "digits covered": sum(amount >= len(samples) / 100 for amount in found.labels.values()),
        "sharpness": sharpness(samples) / sharpness(held_out.images),
    }


def train(
    bench: Bench,
    label: str,
    model: Any,
    objective: GenerativeObjective,
    digits: LabelledImages,
    steps: int,
    momentum: float,
    measure: Callable[[], float],
) -> list[Point]:
    """Train in place at a constant rate. Returns MEASURED measurements of the second half."""
    optimizers = phase_optimizers(model, dict.fromkeys(objective.trained, RATE), (momentum, 0.99))
    rng, points, every = generator(bench.seed), [], max(1, steps // (2 * MEASURED))
    for step in bench.each(label, range(1, steps + 1)):
        batch = draw_digits(rng, digits.images, model.spec.latent, ROWS)
        train_phase(model, objective, batch, step, optimizers)
        if (steps - step) % every == 0 and (steps - step) // every < MEASURED:
            points.append((step / steps, measure()))
    return points
