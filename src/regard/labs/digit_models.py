"""What labs on generative models share: handwritten digits, a classifier that judges samples, and training.

The images are those of scikit-learn, 8 x 8 pixels from -1 to 1; a tenth, the same for every seed, is held out. The
classifier sees real images only.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.sources.images import Digits, LabelledImages, labelled_images
from regard.labs.experiment import Bench
from regard.labs.fit import fit, generator
from regard.models.generative.autoencoder import Autoencoder, AutoencoderModule
from regard.models.generative.base import MLP
from regard.models.generative.vae import VAE, VAEModule
from regard.objectives.base import LossResult
from regard.objectives.reconstruction import Reconstruction, Variational

PIXELS, ROWS, RATE = 64, 64, 2e-3
HIDDEN = (256, 256)


def read_digits(bench: Bench) -> tuple[LabelledImages, LabelledImages]:
    """For training, and held out."""
    splits = Digits().open(hold_out=True)
    assert splits.held_out is not None
    limit, held_out_limit = bench.setting((2000, 2000), (40, 20))
    return labelled_images(splits.train, limit), labelled_images(splits.held_out, held_out_limit)


def train_classifier(bench: Bench, digits: LabelledImages) -> nn.Module:
    """A convolutional net, trained on images that are moved by up to a pixel."""
    torch.manual_seed(bench.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(64 * 16, 10),
    )  # fmt: skip
    steps = bench.setting(600, 2)  # the same for a small run: it is the measure, not what is measured
    fit(bench, "classifier", model, partial(draw_moved, digits=digits), steps, RATE, objective=label_loss)
    return model


def draw_moved(rng: torch.Generator, digits: LabelledImages) -> Batch:
    rows = torch.randint(len(digits.images), (ROWS,), generator=rng)
    down, right = torch.randint(-1, 2, (2,), generator=rng).tolist()
    images = F.pad(digits.images[rows], (1, 1, 1, 1), value=-1.0)[:, :, 1 - down :, 1 - right :][:, :, :8, :8]
    return Batch(images=images, labels=digits.labels[rows])


def label_loss(model: nn.Module, batch: Batch) -> LossResult:
    logits = model(batch.images)
    correct = (logits.detach().argmax(-1) == batch.labels).sum()
    return F.cross_entropy(logits, batch.labels, reduction="sum"), torch.ones(len(logits)).sum(), {"accuracy": correct}


@torch.no_grad()
def classifier_accuracy(model: nn.Module, digits: LabelledImages) -> float:
    return (model(digits.images).argmax(-1) == digits.labels).float().mean().item()


def draw_digits(rng: torch.Generator, images: Tensor, latent: int, rows: int = ROWS) -> Batch:
    """Images, and noise for their codes."""
    chosen = torch.randint(len(images), (rows,), generator=rng)
    return Batch(data=images[chosen], noise=torch.randn(rows, latent, generator=rng))


def train_autoencoder(
    bench: Bench, digits: LabelledImages, latent: int, steps: int, hidden: tuple[int, ...] = HIDDEN, rows: int = ROWS
) -> AutoencoderModule:
    net = MLP(hidden)
    spec = Autoencoder(latent=latent, encoder=net, decoder=net, output="tanh" if hidden else "identity")
    model = spec.build(bench.seed)
    label = f"autoencoder, {latent} numbers" + ", linear" * (not hidden)
    make_batch = partial(draw_digits, images=digits.images, latent=latent, rows=rows)
    fit(bench, label, model, make_batch, steps, RATE * (rows / ROWS) ** 0.5, objective=Reconstruction())
    return model


def train_vae(bench: Bench, digits: LabelledImages, latent: int, beta: float, steps: int) -> VAEModule:
    model = VAE(latent=latent, encoder=MLP(HIDDEN), decoder=MLP(HIDDEN), output="tanh").build(bench.seed)
    make_batch = partial(draw_digits, images=digits.images, latent=latent)
    fit(bench, f"VAE, β {beta:g}", model, make_batch, steps, RATE, objective=Variational(beta=beta))
    return model


def probe_accuracy(codes: Tensor, labels: Tensor, test_codes: Tensor, test_labels: Tensor) -> float:
    """Accuracy of a linear classifier of standardized codes, fitted by least squares with a small ridge."""
    mean, deviation = codes.mean(0), codes.std(0) + 1e-6

    def design(values: Tensor) -> Tensor:
        return torch.cat([(values - mean) / deviation, torch.ones(len(values), 1)], 1).double()

    x, y = design(codes), F.one_hot(labels, 10).double()
    weights = torch.linalg.solve(x.T @ x + 1e-3 * len(x) * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
    return ((design(test_codes) @ weights).argmax(1) == test_labels).float().mean().item()


def noise_of(seed: int, like: Tensor, scale: float) -> Tensor:
    return scale * torch.randn(like.shape, generator=generator(seed))
