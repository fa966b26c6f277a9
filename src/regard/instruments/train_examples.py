"""Trains the models of examples.py and writes their weights: `python -m regard.instruments.train_examples [NAME …]`.

A few minutes on a CPU. Each model sees fresh random examples in every step; the printed number is the share of correct
predictions on examples that it has not seen.
"""

import math
import sys
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.compat import save_tensors
from regard.instruments.examples import (
    MASK,
    MAX_REVERSED,
    SYMBOLS,
    TARGET_WORDS,
    WEIGHTS,
    WORDS,
    ids,
    pair,
    random_picture,
    sentence,
    specs,
)

STEPS = {"language-model": 700, "draft": 300, "masked": 900, "translation": 1000, "additive": 700, "reversal": 2500,
         "reversal-attention": 1500, "vision": 1500}  # fmt: skip
ROWS = 64
TrainingRows = tuple[tuple[Tensor, ...], Tensor]  # arguments of the model, targets (B, L) or (B,) with -100 for none


def next_words(rng: Random) -> TrainingRows:
    rows = torch.tensor([ids(sentence(rng)) for _ in range(ROWS)])
    return (rows[:, :-1],), rows[:, 1:]


def masked_words(rng: Random) -> TrainingRows:
    """Some of the words are masked; of these the targets are the words."""
    rows = torch.tensor([ids(sentence(rng)) for _ in range(ROWS)])
    chosen = torch.tensor([[rng.random() < 0.25 and i > 0 for i in range(rows.shape[1])] for _ in range(ROWS)])
    return (rows.masked_fill(chosen, WORDS.index(MASK)),), rows.masked_fill(~chosen, -100)


def translations(rng: Random) -> TrainingRows:
    pairs = [pair(rng) for _ in range(ROWS)]
    source = torch.tensor([ids(a) for a, _ in pairs])
    target = torch.tensor([ids(b, TARGET_WORDS) for _, b in pairs])
    return (source, F.pad(target, (1, -1))), target


def reversals(rng: Random, length: int | None = None) -> TrainingRows:
    length = length or rng.randint(1, MAX_REVERSED)
    source = torch.tensor([[rng.randint(1, SYMBOLS) for _ in range(length)] for _ in range(ROWS)])
    return (source, F.pad(source.flip(1), (1, -1))), source.flip(1)


def pictures(rng: Random) -> TrainingRows:
    images, labels = zip(*(random_picture(rng) for _ in range(ROWS)), strict=True)
    return (torch.stack(images),), torch.tensor(labels)


EXAMPLES = {"language-model": next_words, "draft": next_words, "masked": masked_words, "translation": translations,
            "additive": translations, "reversal": reversals, "reversal-attention": reversals,
            "vision": pictures}  # fmt: skip


def train(name: str) -> nn.Module:
    model, rng, steps = specs()[name].build(seed=1).train(), Random(name), STEPS[name]
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        rate = min(1.0, (step + 1) / 50) * (0.52 + 0.48 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = 5e-3 * rate
        inputs, targets = EXAMPLES[name](rng)
        loss = F.cross_entropy(model(*inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, name: str, seed: int = 0) -> float:
    inputs, targets = EXAMPLES[name](Random(seed))
    counted = targets != -100
    return float((model(*inputs).argmax(-1) == targets)[counted].float().mean())


def main() -> None:
    WEIGHTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or EXAMPLES:
        model = train(name)
        weights = {key: value.half().contiguous().clone() for key, value in model.state_dict().items()}
        save_tensors(weights, WEIGHTS / f"{name}.safetensors")
        print(f"{name}: {accuracy(model, name):.3f} correct", flush=True)


if __name__ == "__main__":
    main()
