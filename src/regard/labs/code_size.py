"""A code of few numbers forces an autoencoder to find structure; with as many as the input it may simply copy.

Autoencoders of handwritten digits of 64 pixels, with codes of 2 to 64 numbers, with two hidden layers each way or
with none (linear). Whether one copies shows in images on which it was not trained: noise added to the input of a copy
is in its output, and an image of shuffled pixels is reconstructed like any other. Whether it finds structure shows in
how well a linear classifier reads the digit from the code, against as many random projections of the pixels.

Noise has a standard deviation of 0.5 where pixels go from -1 to 1. The share of noise that passes is the slope of the
output's change with the noise: 1 for a copy, and latent / 64 for a projection onto so many directions. No autoencoder
was trained to remove noise.
"""

# ledger: ae.squeeze

import torch

from regard.evals.samples import reconstruct, unexplained
from regard.labs.digit_models import (
    HIDDEN,
    PIXELS,
    noise_of,
    probe_accuracy,
    read_digits,
    train_autoencoder,
)
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator

NARROW, NOISE, ROWS = 8, 0.5, 256


def run(bench: Bench) -> Findings:
    digits, held_out = read_digits(bench)
    steps, widths = bench.training(1000, 2), bench.setting((2, 4, 8, 16, 32, 64), (8, 64))
    images = held_out.images
    noise = noise_of(bench.seed, images, NOISE)
    order = torch.rand(images.shape, generator=generator(bench.seed)).flatten(1).argsort(1)
    shuffled = images.flatten(1).gather(1, order).view_as(images)
    rows = {}
    for hidden in (HIDDEN, ()):
        for latent in widths if hidden else (NARROW, PIXELS):
            model = train_autoencoder(bench, digits, latent, steps, hidden, ROWS)
            clean, noisy = reconstruct(model, images), reconstruct(model, images + noise)
            with torch.no_grad():
                codes, test_codes = model.encode(digits.images), model.encode(images)
            rows["MLP" if hidden else "linear", latent] = {
                "digits, unexplained": unexplained(clean, images),
                "shuffled pixels, unexplained": unexplained(reconstruct(model, shuffled), shuffled),
                "noise that passes": float(((noisy - clean) * noise).sum() / noise.square().sum()),
                "error of noisy digits": float((noisy - images).square().sum() / noise.square().sum()),
                "probe": probe_accuracy(codes, digits.labels, test_codes, held_out.labels),
            }
    projection = torch.randn(PIXELS, NARROW, generator=generator(bench.seed))
    random = probe_accuracy(
        digits.images.flatten(1) @ projection, digits.labels, images.flatten(1) @ projection, held_out.labels
    )
    error = {latent: values["digits, unexplained"] for (name, latent), values in rows.items() if name == "MLP"}
    few, many, copy = rows["MLP", NARROW], rows["MLP", PIXELS], rows["linear", PIXELS]
    widest, narrowest = max(widths), min(widths)
    checks = [
        Check(f"{widest} numbers leave less of held-out digits unexplained than {narrowest}, by a factor of 4",
              f"{error[widest]:.3f} and {error[narrowest]:.3f}", 4 * error[widest] < error[narrowest]),
        Check(f"a linear code of {PIXELS} numbers copies: it passes at least 0.9 of the noise, and leaves at most 0.1 "
              "of shuffled pixels unexplained",
              f"{copy['noise that passes']:.3f} and {copy['shuffled pixels, unexplained']:.3f}",
              copy["noise that passes"] >= 0.9 and copy["shuffled pixels, unexplained"] <= 0.1),
        Check(f"with hidden layers too, {PIXELS} numbers pass at least half of the noise",
              f"{many['noise that passes']:.3f}", many["noise that passes"] >= 0.5),
        Check(f"{NARROW} numbers pass at most a quarter of it", f"{few['noise that passes']:.3f}",
              few["noise that passes"] <= 0.25),
        Check(f"{NARROW} numbers cannot copy shuffled pixels: at least 0.7 is left unexplained, and more than "
              f"with {PIXELS}",
              f"{few['shuffled pixels, unexplained']:.3f} and {many['shuffled pixels, unexplained']:.3f}",
              few["shuffled pixels, unexplained"] >= max(0.7, many["shuffled pixels, unexplained"])),
        Check(f"{NARROW} numbers remove noise: the error to the clean digit is below that of the noisy one, and below "
              f"that with {PIXELS}",
              f"{few['error of noisy digits']:.3f} and {many['error of noisy digits']:.3f} of the noise",
              few["error of noisy digits"] < min(1.0, many["error of noisy digits"])),
        Check(f"a linear classifier reads the digit from {NARROW} numbers of the code better than from {NARROW} random "
              "projections of the pixels, by 0.1", f"{few['probe']:.3f} and {random:.3f}",
              few["probe"] >= random + 0.1),
    ]  # fmt: skip
    table = [{"network": name, "numbers": latent} | values for (name, latent), values in rows.items()]
    measures = tuple(few)
    plots = [
        Plot("numbers in the code", "share of the variance, unexplained", {
            name.removesuffix(", unexplained"): [(latent, rows["MLP", latent][name]) for latent in widths]
            for name in measures[:2]
        }, "reconstruction", "x"),
        Plot("numbers in the code", "share of the noise", {
            name: [(latent, rows["MLP", latent][name]) for latent in widths] for name in measures[2:4]
        }, f"input with noise of {NOISE}", "x"),
        Plot("numbers in the code", "accuracy", {
            "code": [(latent, rows["MLP", latent]["probe"]) for latent in widths],
            f"{NARROW} random projections": [(latent, random) for latent in widths],
        }, "digit, read by a linear classifier", "x"),
    ]  # fmt: skip
    remark = (
        f"{steps:,} steps of {ROWS} images. Plots: with hidden layers. Errors of noisy digits: shares of the noise's."
    )
    return Findings(table, checks, plots, remark)
