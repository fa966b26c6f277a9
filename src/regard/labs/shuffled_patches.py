"""Positions restore the structure that flattening lost: the grid of an image, the time of a signal.

Encoders with and without positions classify pictures of two squares, a bright and a dark one, cut into patches, whose
label is whether the bright square is to the left, to the right, above or below; and signals of two tones, cut into
pieces of time, whose label is whether the second tone is higher. Then the same pictures and signals are shown with the
patches of each in a random order. A model without positions is equivariant to that and averages over all patches, so
its output cannot change, and it can learn nothing that depends on the arrangement. Pictures have learned positions or
the rows and columns of the grid (two-dimensional RoPE), signals have learned positions.

Dosovitskiy et al. 2020. Guessing is right for one of four directions and one of two orders of tones.
"""

# ledger: pos.multimodal

from dataclasses import replace

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.kernels.attention.mask import Full
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import Classification
from regard.models.stack import Repeat
from regard.objectives.classification import classification
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import RMSNorm
from regard.parts.patches import Patches
from regard.parts.position.base import NoPosition
from regard.parts.position.learned import Learned
from regard.parts.position.rope2d import Rope2D

WIDTH, SIDE, PATCH, SAMPLES, PIECE = 64, 16, 4, 128, 8
DIRECTIONS = 4
GRID, PIECES = SIDE // PATCH, SAMPLES // PIECE
MODELS = {"image": ("learned", "2-D RoPE", "none"), "signal": ("learned", "none")}


def run(bench: Bench) -> Findings:
    table, found = [], {}
    for task, schemes in MODELS.items():
        for scheme in schemes:
            torch.manual_seed(bench.seed)
            model, draw = classifier(task, scheme), DRAW[task]
            steps = bench.training({"image": 600, "signal": 150}[task], 2)
            fit(bench, f"{task}, {scheme}", model, lambda rng, draw=draw: draw(rng, 64), steps, 4e-3,
                objective=classification)  # fmt: skip
            found[task, scheme] = measure(model, task, draw(generator(10_000 + bench.seed), bench.setting(1000, 8)))
            table.append({"task": task, "positions": scheme} | found[task, scheme])
    checks = []
    for task, (first, *others) in MODELS.items():
        blind = found[task, "none"]
        for scheme in (first, *others[:-1]):
            seeing = found[task, scheme]
            checks += [
                Check(f"{task}, {scheme}: the accuracy is higher than without positions, by 0.1 or more",
                      f"{seeing['intact']:.2f} and {blind['intact']:.2f}", seeing["intact"] >= blind["intact"] + 0.1),
                Check(f"{task}, {scheme}: shuffled, it falls by 0.1 or more",
                      f"{seeing['intact']:.2f} to {seeing['shuffled']:.2f}",
                      seeing["shuffled"] <= seeing["intact"] - 0.1),
            ]  # fmt: skip
        checks.append(Check(f"{task}, none: shuffling changes no logit by more than 1e-4",
                            f"{blind['largest change']:.0e}", blind["largest change"] < 1e-4))  # fmt: skip
    groups = tuple(f"{task}\n{scheme}" for task, scheme in found)
    bars = {test: [(i, values[test]) for i, values in enumerate(found.values())] for test in ("intact", "shuffled")}
    plots = [Plot("", "accuracy", bars, "patches in order and shuffled", groups=groups)]
    return Findings(table, checks, plots, "Guessing: 0.25 for images, 0.5 for signals.")


def classifier(task: str, scheme: str) -> EncoderModule:
    if task == "image":
        patches, classes = Patches((PATCH, PATCH), (SIDE, SIDE), channels=1, cls=False), DIRECTIONS
    else:
        patches, classes = Patches((PIECE,), (SAMPLES,), channels=1, cls=False), 2
    attention = Attention(4, mask=Full(), position=Rope2D(GRID) if scheme == "2-D RoPE" else NoPosition())
    layers = (Repeat((Block((Sublayer(attention), Sublayer(SwiGLU(2 * WIDTH)))),), 2),)
    spec = Encoder(patches, WIDTH, layers, norm=RMSNorm(), head=Classification(classes, "mean"))
    return (replace(spec, position=Learned(patches.length)) if scheme == "learned" else spec).build()


def dots(rng: torch.Generator, rows: int) -> Batch:
    """Pictures of a bright and a dark square, two patches of one row (labels 0, 1) or one column (2, 3) of the grid."""
    labels = torch.randint(DIRECTIONS, (rows,), generator=rng)
    pair = torch.rand(rows, GRID, generator=rng).argsort(1)[:, :2].sort(1).values  # along the line, different
    pair = torch.where(labels[:, None] % 2 == 0, pair, pair.flip(1))  # of the bright and of the dark square
    line = torch.randint(GRID, (rows, 1), generator=rng).expand(rows, 2)
    horizontal = labels[:, None] < 2
    patch_rows, patch_columns = torch.where(horizontal, line, pair), torch.where(horizontal, pair, line)
    every = torch.arange(rows)[:, None]
    patches = torch.zeros(rows, GRID, GRID)
    patches[every, patch_rows, patch_columns] = torch.tensor([2.0, -2.0])
    images = patches.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    images += 0.3 * torch.randn(images.shape, generator=rng)
    return Batch(images=images.unsqueeze(1), labels=labels)


def tones(rng: torch.Generator, rows: int) -> Batch:
    """Signals (B, 1, SAMPLES) of two tones in noise; the label is 1 if the second is higher. Phases are random."""
    pitches = 2 + 6 * torch.rand(rows, 2, 1, generator=rng)  # in periods per 32 samples
    time = torch.arange(SAMPLES // 2) / 32
    waves = torch.sin(2 * torch.pi * (pitches * time + torch.rand(rows, 2, 1, generator=rng))).flatten(1)
    noise = 0.1 * torch.randn(waves.shape, generator=rng)
    return Batch(images=(waves + noise).unsqueeze(1), labels=(pitches[:, 1] > pitches[:, 0]).flatten().long())


DRAW = {"image": dots, "signal": tones}


@torch.no_grad()
def measure(model: EncoderModule, task: str, batch: Batch) -> dict[str, float]:
    count = GRID * GRID if task == "image" else PIECES
    order = torch.rand(batch.size, count, generator=generator(0)).argsort(1)
    intact, shuffled = model(batch.images), model(shuffle(batch.images, task, order))
    return {
        "intact": (intact.argmax(-1) == batch.labels).float().mean().item(),
        "shuffled": (shuffled.argmax(-1) == batch.labels).float().mean().item(),
        "largest change": (intact - shuffled).abs().max().item(),
    }


def shuffle(images: Tensor, task: str, order: Tensor) -> Tensor:
    """The images or signals with their patches in these orders (B, patches)."""
    every = torch.arange(len(images))[:, None]
    if task == "signal":
        return images[:, 0].unflatten(-1, (PIECES, PIECE))[every, order].flatten(1).unsqueeze(1)
    patches = images[:, 0].unflatten(2, (GRID, PATCH)).unflatten(1, (GRID, PATCH))  # (B, rows, PATCH, columns, PATCH)
    patches = patches.transpose(2, 3).flatten(1, 2)[every, order]  # (B, patches, PATCH, PATCH)
    return patches.unflatten(1, (GRID, GRID)).transpose(2, 3).flatten(3).flatten(1, 2).unsqueeze(1)
