"""Autoencoder, VAE and GAN compared: every cell of the table is measured, with models of equal networks.

All but the course of training is computed live, on held-out digits and on 1,000 samples. Goodfellow et al. 2014; Kingma
& Welling 2014. The models are those of generative_examples.py, trained with one seed.
"""

import json
from functools import cache

import torch

from regard.evals.samples import near_distance, reconstruct, sharpness, unexplained
from regard.instruments.generative_examples import (
    COURSES_FILE,
    FAMILIES,
    digit_images,
    draw,
    generative_model,
    gray,
)
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider
from regard.instruments.measurements import percent
from regard.instruments.panels import bars, lines, numbers, pictures, table

NAMES = dict(zip(FAMILIES, ("autoencoder", "VAE", "GAN"), strict=True))
IDEAS = ("encode and decode", "clouds and a KL", "two networks compete")
SAMPLES, DRAWN = 1000, 5
MEASURES = {  # name: its label, and the unit
    "reconstruction": ("variance of digits lost by reconstruction", " %"),
    "codes": ("digits whose nearest code has their label", " %"),
    "generation": ("samples near a real digit", " %"),
    "variety": ("digits among these, of 10", ""),
    "sharpness": ("sharpness of samples; real digits: 1", ""),
    "steadiness": ("range of samples near a digit, second half of training", " %"),
}


@cache
def courses() -> dict[str, list[tuple[float, float]]]:
    """By model: (share of the training, share of samples near a digit), as train_generative.py measured them."""
    return json.loads(COURSES_FILE.read_text(encoding="utf-8"))


@cache
def measurements(family: str) -> dict[str, float]:
    """By measure; those of codes are missing for a GAN, which has no encoder."""
    model, digits = generative_model(family), digit_images()
    images, labels, found = digits.images, digits.labels, {}
    if hasattr(model, "encode"):
        codes = model.encode(images)
        nearest = torch.cdist(codes, codes).fill_diagonal_(float("inf")).argmin(1)
        found["reconstruction"] = 100 * unexplained(reconstruct(model, images), images)
        found["codes"] = 100 * float((labels[nearest] == labels).float().mean())
    samples = draw(model, images, SAMPLES, 0)
    distances, nearest = torch.cdist(samples.flatten(1), images.flatten(1)).min(1)
    near = distances <= near_distance(images)
    counts = labels[nearest[near]].bincount(minlength=10)
    shares = [share for _, share in courses()[family]]
    return found | {
        "generation": 100 * float(near.float().mean()),
        "variety": int((counts >= SAMPLES / 100).sum()),
        "sharpness": sharpness(samples) / sharpness(images),
        "steadiness": 100 * (max(shares) - min(shares)),
    }


def cell(family: str, measure: str) -> str:
    value, (_, unit) = measurements(family).get(measure), MEASURES[measure]
    if value is None:
        return "no encoder"
    return percent(value / 100) if unit else f"{value:.3g}"


def compare(measure: str, seed: int) -> list[Panel]:
    digits, (label, unit) = digit_images().images, MEASURES[measure]
    found = {name: measurements(family) for family, name in NAMES.items()}
    rows = [(text, *(cell(family, key) for family in FAMILIES)) for key, (text, _) in MEASURES.items()]
    shown = (seed * DRAWN + torch.arange(DRAWN)) % len(digits)
    return [
        table("measured on held-out digits and 1,000 samples", ("", *NAMES.values()), [("idea", *IDEAS), *rows]),
        bars(label, {name: values[measure] for name, values in found.items() if measure in values}, unit),
        lines(
            "samples near a real digit, in the second half of training",
            {name: courses()[family] for family, name in NAMES.items()},
            "share of the training", "share", from_zero=False,
        ),
        pictures("held-out digits", gray(digits[shown])),
        *(
            pictures(f"{name}: random codes, decoded", gray(draw(generative_model(family), digits, DRAWN, seed)))
            for family, name in NAMES.items()
        ),
        numbers(
            {
                "near: distance to a held-out digit, at most": near_distance(digits),
                "numbers in a code: autoencoder, VAE": generative_model("vae").spec.latent,
                "numbers in the noise of the GAN": generative_model("gan").spec.latent,
            }
        ),
    ]  # fmt: skip


INSTRUMENTS = (
    Instrument(
        "generative-table", "Autoencoder, VAE and GAN",
        "Three ways to learn handwritten digits, with equal networks: what each can do, and how well, is measured.",
        r"\hat{x} = g(f(x)) \qquad \hat{x} = g(\mu + \sigma \varepsilon) \qquad \tilde{x} = G(z)",
        (
            Selection("measure", "measure of the bars", tuple(MEASURES), "generation"),
            Slider("seed", "draw of samples", 1, 20, 1),
        ),
        Quiz(
            "Samples of the VAE are the nearest to real digits. Are they the sharpest, too?",
            "No: they have 0.71 of the edges of real digits, those of the GAN 1.03. But its training is less steady: "
            "samples near a digit range over 8.4 %, those of the VAE over 0.4 %.",
            {"measure": "sharpness"},
        ),
        compare,
        ("models/generative/autoencoder.py", "models/generative/vae.py", "models/generative/gan.py"),
    ),
)  # fmt: skip
