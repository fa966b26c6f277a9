"""A vision transformer matches or beats a convolutional net given enough images, and lags where images are scarce.

Both classify generated pictures of 16 x 16 pixels: a disk, ring, square, frame, plus or cross of random size,
brightness and position in noise. They have about the same number of parameters and take the same number of steps; what
grows is the number of different training images. A convolution with pooling is built for shapes that may be anywhere;
the transformer has learned positions and attends between patches, so it has to learn that from the images.

Dosovitskiy et al. 2020. Small models and simple pictures: the number of images that is enough here is not theirs.
"""

# ledger: vit.cnn

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.kernels.attention.mask import Full
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.small_models import parameter_count
from regard.models.encoder import Encoder
from regard.models.heads import Classification
from regard.models.presets import pre_norm_block
from regard.models.stack import Repeat
from regard.objectives.base import LossResult
from regard.parts.norm import LayerNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned

SIDE, CLASSES, WIDTH = 16, 6, 64


def run(bench: Bench) -> Findings:
    counts, steps = bench.setting((250, 1000, 4000, 16000, 64000), (16, 32)), bench.training(800, 2)
    test = draw_shapes(generator(10_000 + bench.seed), bench.setting(2000, 16))
    names, points = ("ViT", "CNN"), {name: [] for name in ("ViT", "CNN")}
    sizes = {}
    for count in counts:
        images, labels = draw_shapes(generator(bench.seed), count)
        for name in names:
            torch.manual_seed(bench.seed)
            model = vision_transformer() if name == "ViT" else convolutional_net()
            sizes[name] = parameter_count(model)
            make_batch = partial(choose, images=images, labels=labels)
            fit(bench, f"{name}, {count:,} images", model, make_batch, steps, 2e-3, objective=shape_loss)
            with torch.no_grad():
                points[name].append((count, (model(test[0]).argmax(-1) == test[1]).float().mean().item()))
    table = [
        {"model": name, "parameters": sizes[name]} | {f"{count:,} images": share for count, share in points[name]}
        for name in names
    ]
    (few_vit, *_, many_vit), (few_cnn, *_, many_cnn) = ([share for _, share in points[name]] for name in names)
    checks = [
        Check(f"with {counts[0]:,} images the ViT is less accurate, by 0.05 or more",
              f"{few_vit:.3f} and {few_cnn:.3f}", few_vit <= few_cnn - 0.05),
        Check(f"with {counts[-1]:,} images the ViT is as accurate or more, within 0.01",
              f"{many_vit:.3f} and {many_cnn:.3f}", many_vit >= many_cnn - 0.01),
        Check("the gap is smaller with the most images than with the fewest",
              f"{few_cnn - few_vit:.3f} -> {many_cnn - many_vit:.3f}", many_cnn - many_vit < few_cnn - few_vit),
    ]  # fmt: skip
    plots = [Plot("training images", "accuracy", points, f"{CLASSES} shapes, unseen pictures", "x")]
    return Findings(table, checks, plots, f"Each model took {steps:,} steps of 64 images.")


def vision_transformer() -> nn.Module:
    patches = Patches((4, 4), (SIDE, SIDE), channels=1)
    block = pre_norm_block(4, 2 * WIDTH, LayerNorm(), Full(), "gelu")
    layers, position = (Repeat((block,), 3),), Learned(patches.length)
    return Encoder(patches, WIDTH, layers, position, norm=LayerNorm(), head=Classification(CLASSES)).build()


def convolutional_net() -> nn.Module:
    def stage(channels: int, out: int, *after: nn.Module) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU(), *after]

    return nn.Sequential(
        *stage(1, 32, nn.MaxPool2d(2)), *stage(32, 64, nn.MaxPool2d(2)), *stage(64, 104), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(104, CLASSES),
    )  # fmt: skip


def shape_loss(model: nn.Module, batch: Batch) -> LossResult:
    logits = model(batch.images)
    correct = (logits.detach().argmax(-1) == batch.labels).sum()
    return F.cross_entropy(logits, batch.labels, reduction="sum"), torch.ones(len(logits)).sum(), {"accuracy": correct}


def choose(rng: torch.Generator, images: Tensor, labels: Tensor) -> Batch:
    rows = torch.randint(len(images), (64,), generator=rng)
    return Batch(images=images[rows], labels=labels[rows])


def draw_shapes(rng: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Images (count, 1, SIDE, SIDE) and labels (count,)."""
    labels = torch.randint(CLASSES, (count,), generator=rng)
    radius, brightness, row, column = torch.rand(4, count, 1, 1, generator=rng)
    radius = 2.5 + 2.5 * radius
    grid = torch.arange(SIDE, dtype=torch.float32)
    y = (grid[:, None] - radius - (SIDE - 1 - 2 * radius) * row).abs() / radius  # (count, SIDE, 1 -> SIDE)
    x = (grid[None, :] - radius - (SIDE - 1 - 2 * radius) * column).abs() / radius
    y, x = torch.broadcast_tensors(y, x)  # distances from the centre, in radii
    near, far, round_ = torch.minimum(x, y), torch.maximum(x, y), (x * x + y * y).sqrt()
    shapes = torch.stack([
        round_ < 1,  # disk
        (round_ < 1) & (round_ > 0.55),  # ring
        far < 0.85,  # square
        (far < 0.85) & (far > 0.45),  # frame
        (near < 0.3) & (far < 1),  # plus
        ((x - y).abs() < 0.4) & (far < 0.85),  # cross
    ])  # fmt: skip
    drawn = shapes[labels, torch.arange(count)] * (0.5 + brightness)
    return (drawn + 0.3 * torch.randn(drawn.shape, generator=rng)).unsqueeze(1), labels
