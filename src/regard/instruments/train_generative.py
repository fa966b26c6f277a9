"""Trains the models of generative_examples.py and writes their weights, and the held-out digits:

    python -m regard.instruments.train_generative [NAME …]

Two minutes on a CPU. Needs scikit-learn, which the instruments do not. With NAMES, only these models are trained; the
others keep their weights.
"""

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from regard.compat import save_tensors
from regard.data.batch import Batch
from regard.data.sources.images import Digits, LabelledImages, labelled_images
from regard.evals.samples import share_near
from regard.instruments.generative_examples import (
    COURSES_FILE,
    DIGITS_FILE,
    FAMILIES,
    FEW_DIGITS,
    LEVELS,
    MODELS_FILE,
    draw,
    specs,
)
from regard.models.generative.gan import GAN
from regard.models.generative.vae import VAE
from regard.objectives.gan import Adversarial
from regard.objectives.generative import GenerativeObjective, phase_optimizers, train_phase
from regard.objectives.reconstruction import Reconstruction, Variational

ROWS, STEPS, RATE = 256, 1000, 5e-3
FAMILY_RATE, GAN_STEPS = 1e-3, 4000  # steps of both networks together


def train(name: str, digits: LabelledImages, measure: Callable[[Any], float]) -> tuple[dict[str, Tensor], list[Any]]:
    """The weights, and for the families, whose rate is constant, measurements (step, value) of the second half."""
    spec, rng = specs()[name], torch.Generator().manual_seed(1)
    model: Any = spec.build(seed=1)
    few, steps, rate, family = name.startswith(("dots", "clouds")), STEPS, RATE, name in FAMILIES
    images = digits.images[digits.labels < FEW_DIGITS] if few else digits.images
    objective: GenerativeObjective = Reconstruction()
    momentum = 0.9
    if isinstance(spec, VAE):
        objective = Variational(beta=0.8 if family else float(name.removeprefix("clouds-")))
    if isinstance(spec, GAN):
        objective, momentum, steps = Adversarial(), 0.0, GAN_STEPS
    rate = RATE if not family else FAMILY_RATE
    optimizers = phase_optimizers(model, dict.fromkeys(objective.trained, rate), (momentum, 0.99), fused=True)
    history, loss = [], math.nan
    for step in range(steps):
        chosen = torch.randint(len(images), (ROWS,), generator=rng)
        batch = Batch(data=images[chosen], noise=torch.randn(ROWS, spec.latent, generator=rng))
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = rate * (1 if family else 0.5 + 0.5 * math.cos(math.pi * step / steps))
        loss = train_phase(model, objective, batch, step, optimizers)
        left = steps - 1 - step
        if family and left % (steps // 40) == 0 and left < steps // 2:
            history.append([(step + 1) / steps, measure(model)])
    print(f"{name}: last loss {loss:.3f}", *([history[-1]] if history else []), flush=True)
    weights = {f"{name}/{key}": value.half().contiguous().clone() for key, value in model.state_dict().items()}
    return {key: value for key, value in weights.items() if "/discriminator." not in key}, history


def main() -> None:
    splits = Digits().open(hold_out=True)
    assert splits.held_out is not None
    digits, held_out = labelled_images(splits.train, 2000), labelled_images(splits.held_out, 2000)
    pixels = ((held_out.images[:, 0] + 1) * LEVELS / 2).round().to(torch.uint8)
    save_tensors({"images": pixels, "labels": held_out.labels.to(torch.uint8)}, DIGITS_FILE)
    weights = load_file(MODELS_FILE) if MODELS_FILE.exists() else {}
    courses = json.loads(COURSES_FILE.read_text(encoding="utf-8")) if COURSES_FILE.exists() else {}

    def measure(model: Any) -> float:
        return share_near(draw(model, digits.images, 500, 0), held_out.images)

    for name in sys.argv[1:] or specs():
        weights = {key: value for key, value in weights.items() if not key.startswith(f"{name}/")}
        trained, course = train(name, digits, measure)
        weights |= trained
        if course:
            courses[name] = course
    COURSES_FILE.write_text(json.dumps(courses, separators=(",", ":")) + "\n", encoding="utf-8")
    weights = {key: value for key, value in weights.items() if key.partition("/")[0] in specs()}
    save_tensors(weights, MODELS_FILE)


if __name__ == "__main__":
    main()
