"""To keep a few words and skip the rest, what is written must depend on the word: Mamba copies so, a fixed filter not.

Selective copying: four symbols at random places among filler, to be said again in their order. A fixed filter weighs a
token by its age only, so where the ages of what counts differ from text to text it keeps filler's places too. Control:
plain copying, the same symbols at the same places in every text. A fixed filter can do that, so that neither its size
nor its training is what stops it. Everything is as large and trained alike for S4D and Mamba.

Gu & Dao 2023. Theirs are 16 symbols among 4,096 tokens; the difference is the same.
"""

# ledger: mamba.copy

from collections.abc import Callable

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.contenders import contender
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.tasks import FIRST, plain_copying, selective_copying

TRIED: tuple[tuple[str, str, Callable[..., Batch]], ...] = (
    ("S4D", "plain", plain_copying),
    ("S4D", "selective", selective_copying),
    ("Mamba", "selective", selective_copying),
)
MEMORISED, SYMBOLS, WIDTH = 4, 8, 48


def run(bench: Bench) -> Findings:
    length, steps = bench.pick(32, 8), bench.pick(900, 2)
    right, curves = [], {}
    for name, task, make in TRIED:
        torch.manual_seed(bench.seed)
        model = contender(name, FIRST + SYMBOLS, WIDTH)

        def batch(draws: torch.Generator, rows: int = 32, make=make) -> Batch:
            return make(draws, MEMORISED, length, rows, SYMBOLS)

        seen = fit(bench, f"{task} copying, {name}", model, batch, steps, 4e-3, enough=0.05)
        curves[f"{name}, {task}"] = smoothed(seen["accuracy"])
        right.append(accuracy(model, batch(generator(bench.seed + 1), bench.pick(512, 8))))
    table = [
        {"mixer": name, "copying": task, "accuracy": accuracy}
        for (name, task, _), accuracy in zip(TRIED, right, strict=True)
    ]
    plain, selective, mamba = right
    checks = [
        Check("S4D copies from fixed places", f"{plain:.2f}", plain > 0.95),
        Check("S4D fails where the places vary", f"{selective:.2f}", selective < 0.7),
        Check("Mamba solves that", f"{mamba:.2f}", mamba > 0.95),
    ]
    plots = [Plot("step", "accuracy", curves, f"{MEMORISED} of {length} tokens said again")]
    return Findings(table, checks, plots, f"Guessing among {SYMBOLS} symbols: {1 / SYMBOLS:.2f}. Means over 20 steps.")


def smoothed(values: list[float], span: int = 20) -> list[tuple[float, float]]:
    """Means of every so many steps, at their last."""
    ends = range(min(span, len(values)), len(values) + 1, span)
    return [(end, sum(values[max(0, end - span) : end]) / min(span, end)) for end in ends]
