"""What can be cut into tokens and embedded can be attended to: one block learns from text, images, audio and video.

Four encoders have the same blocks, written once; only the input differs: words, patches of a picture, frames of a
spectrogram, and patches of a video with time. Text: which kind of event a sentence of the small world tells. Pictures:
which of six shapes is drawn. Audio: whether the second of two tones is higher. Video: whether a dot moves to the left
or to the right. The same encoders without attention, where every token is transformed alone and the results are
averaged, are shown for comparison and not judged: positions and an average are enough for some of these tasks.
"""

# ledger: mm.agnostic

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.world.english import WORDINGS
from regard.data.world.tasks import event_kind
from regard.kernels.attention.mask import Full
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import MakeBatch, fit, generator
from regard.labs.small_models import parameter_count
from regard.labs.vit_or_cnn import CLASSES, SIDE, draw_shapes
from regard.models.encoder import Encoder
from regard.models.heads import Classification
from regard.models.presets import pre_norm_block
from regard.models.stack import Repeat
from regard.objectives.classification import classification
from regard.parts.frames import Frames
from regard.parts.input import Input, Tokens
from regard.parts.norm import LayerNorm
from regard.parts.patches import Patches
from regard.parts.position.learned import Learned

WIDTH, BYTES, ROWS = 64, 112, 32
BLOCK = pre_norm_block(4, 2 * WIDTH, LayerNorm(), Full(), "gelu")
BLOCKS = (Repeat((BLOCK,), 2),)
EVENTS = tuple(WORDINGS)
SPECTRUM, TIME, FRAMES, LINE = 16, 32, 6, 12  # of the tones: frequencies, frames; of the video: frames, side


def run(bench: Bench) -> Findings:
    sentences, held_out = (read_sentences(bench.setting(count, 40), bench.seed, split)
                           for split, count in (("train", 4000), ("held-out", 1000)))  # fmt: skip
    modalities: dict[str, tuple[Input, int, MakeBatch]] = {  # input, number of classes, random batch
        "text": (Tokens(256), len(EVENTS), partial(choose, passages=sentences)),
        "image": (Patches((4, 4), (SIDE, SIDE), channels=1), CLASSES, shapes),
        "audio": (Frames(SPECTRUM, (2, 2)), 2, tones),
        "video": (Patches((1, 4, 4), (FRAMES, LINE, LINE), channels=1), 2, moving_dots),
    }
    accuracies: dict[str, dict[str, float]] = {"same blocks": {}, "without attention": {}}
    table = []
    for name, (input, classes, make_batch) in modalities.items():
        for label, found in accuracies.items():
            torch.manual_seed(bench.seed)
            model = encoder(input, classes, label == "same blocks").build()
            fit(bench, f"{name}, {label}", model, make_batch, bench.training(800, 2), objective=classification)
            unseen = partial(choose, passages=held_out) if name == "text" else make_batch
            found[name] = mean_accuracy(bench, model, unseen)
        blocks = sum(parameter_count(part) for part in encoder(input, classes).build().stack.blocks)
        table.append({"modality": name, "input": input.kind, "classes": classes, "parameters": blocks}
                     | {label: found[name] for label, found in accuracies.items()})  # fmt: skip
    checks = [
        *(Check(f"{name}: the accuracy is above 0.9", f"{share:.3f}", share > 0.9)
          for name, share in accuracies["same blocks"].items()),
        Check("all four have the same block spec, with the same number of parameters",
              f"{table[0]['parameters']:,}", len({row["parameters"] for row in table}) == 1),
    ]  # fmt: skip
    lines = {label: list(enumerate(found.values())) for label, found in accuracies.items()}
    return Findings(table, checks, [Plot("", "accuracy", lines, "one block spec", groups=tuple(modalities))])


def encoder(input: Input, classes: int, attention: bool = True) -> Encoder:
    layers = BLOCKS if attention else (replace(BLOCKS[0], blocks=(replace(BLOCK, sublayers=BLOCK.sublayers[1:]),)),)
    return Encoder(input, WIDTH, layers, Learned(BYTES), norm=LayerNorm(), head=Classification(classes, "mean"))


@torch.no_grad()
def mean_accuracy(bench: Bench, model: torch.nn.Module, make_batch: MakeBatch) -> float:
    rng, counts = generator(10_000 + bench.seed), []
    for _ in range(bench.setting(16, 1)):
        _, count, metrics = classification(model, make_batch(rng))
        counts.append(torch.stack([metrics["accuracy"], count]))
    correct, count = torch.stack(counts).sum(0)
    return (correct / count).item()


def read_sentences(count: int, seed: int, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of passages, which of them are valid, and the kind of their last event."""
    examples = [event_kind((seed << 20) + index, 3, split) for index in range(count)]
    rows = [list(example["text"].encode())[-BYTES:] for example in examples]
    tokens = torch.tensor([row + [0] * (BYTES - len(row)) for row in rows])
    valid = torch.tensor([[True] * len(row) + [False] * (BYTES - len(row)) for row in rows])
    return tokens, valid, torch.tensor([EVENTS.index(example["label"]) for example in examples])


def choose(rng: torch.Generator, passages: tuple[Tensor, Tensor, Tensor]) -> Batch:
    tokens, valid, labels = passages
    rows = torch.randint(len(tokens), (ROWS,), generator=rng)
    return Batch(tokens=tokens[rows], valid=valid[rows], labels=labels[rows])


def shapes(rng: torch.Generator) -> Batch:
    images, labels = draw_shapes(rng, ROWS)
    return Batch(images=images, labels=labels)


def tones(rng: torch.Generator) -> Batch:
    """Spectrograms (B, SPECTRUM, TIME) of two tones of any pitch; the label is 1 if the second is higher."""
    pitches = torch.rand(ROWS, SPECTRUM, generator=rng).argsort(1)[:, :2]  # different
    pitch = pitches.repeat_interleave(TIME // 2, 1)  # (B, TIME)
    signal = 0.2 * torch.randn(ROWS, SPECTRUM, TIME, generator=rng)
    return Batch(images=signal.scatter_add(1, pitch[:, None], torch.ones(ROWS, 1, TIME)),
                 labels=(pitches[:, 1] > pitches[:, 0]).long())  # fmt: skip


def moving_dots(rng: torch.Generator) -> Batch:
    """Videos (B, 1, FRAMES, LINE, LINE) of a dot in noise; the label is 1 if it moves to the right."""
    right = torch.randint(2, (ROWS,), generator=rng)
    start = torch.randint(LINE - FRAMES + 1, (ROWS,), generator=rng)
    height = torch.randint(LINE, (ROWS, 1), generator=rng)
    time = torch.arange(FRAMES)
    column = start[:, None] + torch.where(right[:, None] == 1, time, FRAMES - 1 - time)  # (B, FRAMES)
    video = 0.2 * torch.randn(ROWS, FRAMES, LINE, LINE, generator=rng)
    video[torch.arange(ROWS)[:, None], time, height, column] += 2.0
    return Batch(images=video.unsqueeze(1), labels=right)
