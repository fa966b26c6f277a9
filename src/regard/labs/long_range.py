"""State-space filters learn from signals of ten thousand steps, where recurrence and attention run out of time.

A signal with one sample per step is one of four slow rhythms with louder noise; the rhythm is predicted from the mean
of the outputs. Single samples and short windows carry almost no information: a period is between an eighth and a
twenty-seventh of the signal, whatever its length. All models have two layers of the same width and train for the same
processor time on signals of 1,024 to 16,384 steps.

Gu et al. 2021 and 2022 (S4, S4D), whose task of raw speech is the most similar. The task suits a filter; recall of
single tokens is the subject of another lab (recall-budget).
"""

# ledger: ssm.s4.long

import math
import time

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.small_models import MIXERS, mixer_block
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import Classification
from regard.models.stack import Repeat
from regard.objectives.classification import classification
from regard.parts.norm import RMSNorm
from regard.parts.patches import Patches
from regard.parts.ssm.s4 import S4D

WIDTH = 32
CYCLES = torch.tensor([8, 12, 18, 27])  # per signal
NAMES = ("S4D", "LSTM", "attention")


def run(bench: Bench) -> Findings:
    lengths, seconds = bench.setting((1024, 4096, 16384), (64, 128)), bench.training(15.0, 0.05)
    signal_counts: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for n in lengths:
        for name in NAMES:
            count, accuracy = train(bench, name, n, seconds)
            signal_counts[name].append((n, count))
            lines[name].append((n, accuracy))
    accuracies = {name: dict(points) for name, points in lines.items()}
    table = [
        {"mixer": name, "n": n, "accuracy": accuracies[name][n], "training signals": count}
        for name in NAMES for n, count in signal_counts[name]
    ]  # fmt: skip
    long = lengths[-2:]
    checks = [
        *(Check(f"S4D learns at {n:,} steps", f"{accuracies['S4D'][n]:.2f}", accuracies["S4D"][n] > 0.8) for n in long),
        *(Check(f"at {n:,} steps S4D is more accurate than LSTM and attention",
                ", ".join(f"{name} {accuracies[name][n]:.2f}" for name in NAMES),
                accuracies["S4D"][n] > max(accuracies["LSTM"][n], accuracies["attention"][n])) for n in long),
    ]  # fmt: skip
    plots = [
        Plot("steps", "accuracy", lines, "rhythm of a noisy signal", "x"),
        Plot("steps", "signals", signal_counts, f"in {seconds:g} s of training", "xy"),
    ]
    remark = (
        f"Guessing: {1 / len(CYCLES)}. Equal time, not equal numbers of signals: with more time all may learn, and "
        "another machine has other results. The table has the number of signals that each model was trained on."
    )
    return Findings(table, checks, plots, remark)


def classifier(name: str, n: int) -> EncoderModule:
    mixer = S4D(state=16) if name == "S4D" else MIXERS[name]
    samples = Patches((1,), (n,), channels=1, cls=False)
    layers = (Repeat((mixer_block(mixer, WIDTH),), 2),)
    return Encoder(samples, WIDTH, layers, norm=RMSNorm(), head=Classification(len(CYCLES), "mean")).build()


def signals(rng: torch.Generator, n: int, rows: int) -> Batch:
    labels = torch.randint(len(CYCLES), (rows,), generator=rng)
    phases = torch.rand(rows, 1, generator=rng)
    cycles = CYCLES[labels].unsqueeze(1) * torch.arange(n) / n + phases  # (B, n)
    noise = torch.randn(rows, n, generator=rng)
    return Batch(images=(torch.sin(2 * math.pi * cycles) + noise).unsqueeze(1), labels=labels)


def train(bench: Bench, name: str, n: int, seconds: float) -> tuple[int, float]:
    """The number of signals in the given time of training, and the accuracy after it."""
    torch.manual_seed(bench.seed)
    rows = min(16, max(2, 16384 // n))
    steps = max(1, int(seconds / seconds_of_step(name, n, rows)))
    model, label = classifier(name, n), f"{name}, {n:,} steps"
    fit(bench, label, model, lambda rng: signals(rng, n, rows), steps, 1e-2, objective=classification)
    test, tests, correct = generator(bench.seed + 1), bench.setting(16, 2), 0.0
    with torch.no_grad():
        for batch in (signals(test, n, rows) for _ in range(tests)):
            correct += (model(batch.images).argmax(-1) == batch.labels).float().mean().item()
    return steps * rows, correct / tests


def seconds_of_step(name: str, n: int, rows: int) -> float:
    """Processor seconds of a forward and backward."""
    model, batch = classifier(name, n), signals(generator(0), n, rows)
    classification(model, signals(generator(0), n, 1))  # warm-up
    start = time.process_time()
    loss, _, _ = classification(model, batch)
    loss.backward()
    return time.process_time() - start
