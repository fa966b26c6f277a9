"""State-space filters learn from signals of ten thousand steps, where recurrence and attention run out of time.

A raw signal, one sample a step, hides one of four slow rhythms under noise that is louder than it; what is read from it
on average says which one. No sample and no neighbourhood of samples tells: a period is an eighth of the signal to a
twenty-seventh, however long it is. All contenders have two layers of the same width and train for the same processor
time on signals of 1,024 to 16,384 steps.

Gu et al. 2021 and 2022 (S4, S4D), of whose tasks raw speech is the nearest to this. It suits a filter: what has to be
looked up instead is another matter, and another lab (recall-budget).
"""

# ledger: ssm.s4.long

import math
import time

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.contenders import MIXERS, block
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import Classification
from regard.models.stack import Repeat
from regard.objectives.classification import classification
from regard.parts.norm import RMSNorm
from regard.parts.patches import Patches
from regard.parts.ssm.s4d import S4D

WIDTH = 32
PERIODS = torch.tensor([8, 12, 18, 27])  # in a signal
NAMES = ("S4D", "LSTM", "attention")


def run(bench: Bench) -> Findings:
    lengths, seconds = bench.pick((1024, 4096, 16384), (64, 128)), bench.pick(15.0, 0.05)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for n in lengths:
        for name in NAMES:
            count, accuracy = learned(bench, name, n, seconds)
            seen[name].append((n, count))
            lines[name].append((n, accuracy))
    right = {name: dict(points) for name, points in lines.items()}
    table = [
        {"mixer": name, "n": n, "accuracy": right[name][n], "signals seen": count}
        for name in NAMES for n, count in seen[name]
    ]  # fmt: skip
    long = lengths[-2:]
    checks = [
        *(Check(f"S4D learns at {n:,} steps", f"{right['S4D'][n]:.2f}", right["S4D"][n] > 0.8) for n in long),
        *(Check(f"at {n:,} steps it is ahead of both others",
                ", ".join(f"{name} {right[name][n]:.2f}" for name in NAMES),
                right["S4D"][n] > max(right["LSTM"][n], right["attention"][n])) for n in long),
    ]  # fmt: skip
    plots = [
        Plot("steps", "accuracy", lines, "rhythm of a noisy signal", "x"),
        Plot("steps", "signals", seen, f"seen in {seconds:g} s of training", "xy"),
    ]
    remark = (
        f"Guessing: {1 / len(PERIODS)}. Equal time, not equal signals: with more of it all may learn, and another "
        f"machine gives other numbers. At {long[-1]:,} steps even S4D saw only {seen['S4D'][-1][1]:,} signals in it."
    )
    return Findings(table, checks, plots, remark)


def reader(name: str, n: int) -> EncoderModule:
    mixer = S4D(state=16) if name == "S4D" else MIXERS[name]
    samples = Patches((1,), (n,), channels=1, cls=False)
    layers = (Repeat((block(mixer, WIDTH),), 2),)
    return Encoder(samples, WIDTH, layers, norm=RMSNorm(), head=Classification(len(PERIODS), "mean")).build()


def signals(draws: torch.Generator, n: int, rows: int) -> Batch:
    labels = torch.randint(len(PERIODS), (rows,), generator=draws)
    phases = torch.rand(rows, 1, generator=draws)
    turns = PERIODS[labels].unsqueeze(1) * torch.arange(n) / n + phases  # (B, n)
    noise = torch.randn(rows, n, generator=draws)
    return Batch(images=(torch.sin(2 * math.pi * turns) + noise).unsqueeze(1), labels=labels)


def learned(bench: Bench, name: str, n: int, seconds: float) -> tuple[int, float]:
    """Signals that the time allowed to see, and accuracy after them."""
    torch.manual_seed(bench.seed)
    rows = min(16, max(2, 16384 // n))
    steps = max(1, int(seconds / time_of_step(name, n, rows)))
    model, what = reader(name, n), f"{name}, {n:,} steps"
    fit(bench, what, model, lambda draws: signals(draws, n, rows), steps, 1e-2, objective=classification)
    test, tests, right = generator(bench.seed + 1), bench.pick(16, 2), 0.0
    with torch.no_grad():
        for batch in (signals(test, n, rows) for _ in range(tests)):
            right += (model(batch.images).argmax(-1) == batch.labels).float().mean().item()
    return steps * rows, right / tests


def time_of_step(name: str, n: int, rows: int) -> float:
    """Processor seconds of a forward and backward."""
    model, batch = reader(name, n), signals(generator(0), n, rows)
    classification(model, signals(generator(0), n, 1))  # warms up
    start = time.process_time()
    loss, _, _ = classification(model, batch)
    loss.backward()
    return time.process_time() - start
