"""Selective copying needs a state update that depends on the token: Mamba learns it, a fixed filter cannot.

Four symbols at random positions among filler are to be repeated in order. A fixed filter weights a token by its age
only, which carries some information: the first of four symbols tends to be early. The accuracy that age allows is
computed: every symbol votes for itself, weighted by the probability that a symbol at its position is the one queried.
The claim is that a fixed filter learns no more than that, and Mamba does. As a control, plain copying has the symbols
at the same positions in every sequence, so that neither size nor training limits the filter. S4D and Mamba are trained
in the same way.

Gu & Dao 2023 use 16 symbols among 4,096 tokens.
"""

# ledger: mamba.copy

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import small_decoder
from regard.labs.tasks import FIRST, plain_copying, selective_copying

RUNS: tuple[tuple[str, str, Callable[..., Batch]], ...] = (
    ("S4D", "plain", plain_copying),
    ("S4D", "selective", selective_copying),
    ("Mamba", "selective", selective_copying),
)
MEMORISED, SYMBOLS, WIDTH = 4, 8, 48


def run(bench: Bench) -> Findings:
    length, steps = bench.setting(32, 8), bench.training(2500, 2)
    accuracies, curves = [], {}
    for name, task, make in RUNS:
        torch.manual_seed(bench.seed)
        model = small_decoder(name, FIRST + SYMBOLS, WIDTH)

        def batch(rng: torch.Generator, rows: int = 32, make=make) -> Batch:
            return make(rng, MEMORISED, length, rows, SYMBOLS)

        history = fit(bench, f"{task} copying, {name}", model, batch, steps, 4e-3, stop_below=0.05)
        curves[f"{name}, {task}"] = smooth(history["accuracy"])
        accuracies.append(accuracy(model, batch(generator(bench.seed + 1), bench.setting(512, 8))))
    table = [
        {"mixer": name, "copying": task, "accuracy": value}
        for (name, task, _), value in zip(RUNS, accuracies, strict=True)
    ]
    by_age = accuracy_by_age(selective_copying(generator(bench.seed + 1), MEMORISED, length, 4096, SYMBOLS), length)
    table.append({"mixer": "votes by age", "copying": "selective", "accuracy": by_age})
    plain, selective, mamba = accuracies
    checks = [
        Check("S4D copies from fixed positions", f"{plain:.2f}", plain > 0.95),
        Check("from random positions S4D is no more accurate than votes by age, within 0.05",
              f"{selective:.2f}, votes by age {by_age:.2f}", selective < by_age + 0.05),
        Check("Mamba copies from random positions", f"{mamba:.2f}", mamba > 0.95),
    ]  # fmt: skip
    longest = max(points[-1][0] for points in curves.values())
    curves["votes by age"] = [(0, by_age), (longest, by_age)]
    plots = [Plot("step", "accuracy", curves, f"{MEMORISED} of {length} tokens repeated")]
    remark = (
        f"Guessing among {SYMBOLS} symbols: {1 / SYMBOLS:.2f}. Means over 20 steps. One filter weights tokens by "
        "age only; two with a feed-forward layer between them could learn to count symbols and be more accurate."
    )
    return Findings(table, checks, plots, remark)


def accuracy_by_age(batch: Batch, length: int) -> float:
    """Accuracy of predicting the i-th symbol by a vote in which a symbol at position p has weight P(i-th | p).

    P is hypergeometric: i of the other symbols are at the p earlier positions.
    """
    other_positions, other_symbols = length - 1, MEMORISED - 1
    weights = torch.tensor([
        [
            math.comb(p, i) * math.comb(other_positions - p, other_symbols - i)
            / math.comb(other_positions, other_symbols)
            for p in range(length)
        ]
        for i in range(MEMORISED)
    ])  # fmt: skip
    symbols = F.one_hot(batch.tokens[:, :length], FIRST + SYMBOLS)[..., FIRST:].float()  # (B, length, symbols)
    predicted = FIRST + (weights @ symbols).argmax(-1)  # (B, memorised)
    return (predicted == batch.targets[:, length:]).float().mean().item()


def smooth(values: list[float], span: int = 20) -> list[tuple[float, float]]:
    """The mean of every `span` steps, as points (last step, mean)."""
    ends = range(min(span, len(values)), len(values) + 1, span)
    return [(end, sum(values[max(0, end - span) : end]) / min(span, end)) for end in ends]
