"""Trains the models of generative_examples.py and writes their weights, and the held-out digits:

    python -m regard.instruments.train_generative [NAME …]

Two minutes on a CPU. Needs scikit-learn, which the instruments do not. With NAMES, only these models are trained; the
others keep their weights.
"""

import math
import sys
from itertools import islice

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from regard.compat import save_tensors
from regard.data.batch import Batch
from regard.data.sources.base import Examples, first_epoch
from regard.data.sources.images import Digits
from regard.instruments.generative_examples import (
    DIGITS_FILE,
    FEW_DIGITS,
    LEVELS,
    MODELS_FILE,
    LabelledImages,
    specs,
)
from regard.models.generative.vae import VAE
from regard.objectives.reconstruction import Reconstruction, Variational

ROWS, STEPS, RATE = 256, 1000, 5e-3


def read(split: Examples) -> LabelledImages:
    examples = list(islice(first_epoch(split, 2000), 2000))
    images = torch.from_numpy(np.stack([example["image"] for example in examples]))
    return LabelledImages(images, torch.tensor([example["label"] for example in examples]))


def train(name: str, digits: LabelledImages) -> dict[str, Tensor]:
    spec, rng = specs()[name], torch.Generator().manual_seed(1)
    model = spec.build(seed=1)
    few, beta = name == "dots" or isinstance(spec, VAE), name.removeprefix("clouds-")
    images = digits.images[digits.labels < FEW_DIGITS] if few else digits.images
    objective = Variational(beta=float(beta)) if isinstance(spec, VAE) else Reconstruction()
    optimizer = torch.optim.Adam(model.parameters(), RATE, (0.9, 0.99), fused=True)
    for step in range(STEPS):
        chosen = torch.randint(len(images), (ROWS,), generator=rng)
        batch = Batch(data=images[chosen], noise=torch.randn(ROWS, spec.latent, generator=rng))
        optimizer.param_groups[0]["lr"] = RATE * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        loss, count, _ = objective(model, batch)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    print(f"{name}: last loss {loss.item() / count.item():.3f}", flush=True)
    return {f"{name}/{key}": value.half().contiguous().clone() for key, value in model.state_dict().items()}


def main() -> None:
    splits = Digits().open(hold_out=True)
    assert splits.held_out is not None
    digits, held_out = read(splits.train), read(splits.held_out)
    pixels = ((held_out.images[:, 0] + 1) * LEVELS / 2).round().to(torch.uint8)
    save_tensors({"images": pixels, "labels": held_out.labels.to(torch.uint8)}, DIGITS_FILE)
    weights = load_file(MODELS_FILE) if MODELS_FILE.exists() else {}
    for name in sys.argv[1:] or specs():
        weights = {key: value for key, value in weights.items() if not key.startswith(f"{name}/")}
        weights |= train(name, digits)
    weights = {key: value for key, value in weights.items() if key.partition("/")[0] in specs()}
    save_tensors(weights, MODELS_FILE)


if __name__ == "__main__":
    main()
