"""To keep a few words and skip the rest, what is written must depend on the word: Mamba copies so, a fixed filter not.

Selective copying: four symbols at random places among filler, to be said again in their order. A fixed filter weighs a
token by its age only, and age tells something: the first of four symbols stands rather early. How much it tells is
computed: every symbol votes for itself, weighed by how likely one at its place is to be the one asked for. The claim is
that a fixed filter comes to no more than that, and Mamba does. Control: plain copying, the symbols at the same places
in every text, so that neither size nor training is what stops the filter. S4D and Mamba are trained alike.

Gu & Dao 2023. Theirs are 16 symbols among 4,096 tokens; the difference is the same.
"""

# ledger: mamba.copy

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

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
    length, steps = bench.pick(32, 8), bench.pick(2500, 2)
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
    by_age = told_by_age(selective_copying(generator(bench.seed + 1), MEMORISED, length, 4096, SYMBOLS), length)
    table.append({"mixer": "votes by age", "copying": "selective", "accuracy": by_age})
    plain, selective, mamba = right
    checks = [
        Check("S4D copies from fixed places", f"{plain:.2f}", plain > 0.95),
        Check("where the places vary it knows no more than age tells, within 0.05", f"{selective:.2f}, age tells "
              f"{by_age:.2f}", selective < by_age + 0.05),
        Check("Mamba solves that", f"{mamba:.2f}", mamba > 0.95),
    ]  # fmt: skip
    longest = max(points[-1][0] for points in curves.values())
    curves["votes by age"] = [(0, by_age), (longest, by_age)]
    plots = [Plot("step", "accuracy", curves, f"{MEMORISED} of {length} tokens said again")]
    remark = (
        f"Guessing among {SYMBOLS} symbols: {1 / SYMBOLS:.2f}. Means over 20 steps. One filter weighs by age alone; "
        "two with a feed-forward layer between them could learn to count symbols, and so come to know more."
    )
    return Findings(table, checks, plots, remark)


def told_by_age(batch: Batch, length: int) -> float:
    """Accuracy of a vote: a symbol at place p counts by P(it is the i-th | it stands at p), which is hypergeometric."""
    others, among = length - 1, MEMORISED - 1
    weights = torch.tensor([
        [math.comb(p, i) * math.comb(others - p, among - i) / math.comb(others, among) for p in range(length)]
        for i in range(MEMORISED)
    ])  # fmt: skip
    symbols = F.one_hot(batch.tokens[:, :length], FIRST + SYMBOLS)[..., FIRST:].float()  # (B, length, symbols)
    said = FIRST + (weights @ symbols).argmax(-1)  # (B, memorised)
    return (said == batch.targets[:, length:]).float().mean().item()


def smoothed(values: list[float], span: int = 20) -> list[tuple[float, float]]:
    """Means of every so many steps, at their last."""
    ends = range(min(span, len(values)), len(values) + 1, span)
    return [(end, sum(values[max(0, end - span) : end]) / min(span, end)) for end in ends]
