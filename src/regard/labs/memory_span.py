"""A plain recurrence learns to recall over a few tokens, gated recurrences over more, attention over the longest gap.

Two tasks. Recall after a gap: predict the first symbol of a sequence after a given number of others. Nested clauses, as
in grammar: an opening bracket of one of several kinds per clause, then the closing brackets in reverse order, each of
the kind of its opening one, for a given depth. A new model is trained for each gap and depth, all in the same way.
"""

# ledger: anc.rnn.span

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import small_decoder
from regard.labs.tasks import FIRST, draw_symbols, recall_after_gap, whole_rows

NAMES = ("RNN", "LSTM", "GRU", "attention")
SYMBOLS = 8


def nested(rng: torch.Generator, depth: int, rows: int = 32) -> Batch:
    """Opening symbols, then their closing symbols in reverse: token FIRST + SYMBOLS + i closes FIRST + i."""
    opened = draw_symbols(rng, SYMBOLS, rows, depth)
    tokens = torch.cat([opened, opened.flip(1) + SYMBOLS], 1)
    targets = tokens.roll(-1, 1)
    weights = torch.zeros_like(tokens)
    weights[:, depth - 1 : -1] = 1
    return whole_rows(tokens, targets, weights)


TASKS = {"recall after a gap": recall_after_gap, "nested clauses": nested}


def run(bench: Bench) -> Findings:
    difficulties = {
        "recall after a gap": bench.setting((5, 24), (2, 4)),
        "nested clauses": bench.setting((2, 6), (2, 3)),
    }
    steps = bench.training(800, 2)
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {task: {name: [] for name in NAMES} for task in TASKS}
    for task, make in TASKS.items():
        for difficulty in difficulties[task]:
            for name in NAMES:
                lines[task][name].append((difficulty, train(bench, task, make, difficulty, name, steps)))
    gap, depth = lines["recall after a gap"], lines["nested clauses"]
    table = [
        {"mixer": name, "task": task} | {"gap or depth": x, "accuracy": y}
        for task, found in lines.items() for name, points in found.items() for x, y in points
    ]  # fmt: skip

    def observed(points: dict[str, list[tuple[float, float]]], index: int, *names: str) -> str:
        return ", ".join(f"{name} {points[name][index][1]:.2f}" for name in names)

    (short, long), deepest = difficulties["recall after a gap"], difficulties["nested clauses"][-1]
    at_long_gap = {name: points[-1][1] for name, points in gap.items()}
    checks = [
        Check(f"every model recalls over {short} tokens, with an accuracy above 0.9", observed(gap, 0, *NAMES),
              min(points[0][1] for points in gap.values()) > 0.9),
        Check(f"over {long} tokens LSTM and GRU are more accurate than the plain RNN",
              observed(gap, -1, "RNN", "LSTM", "GRU"),
              at_long_gap["RNN"] < min(at_long_gap["LSTM"], at_long_gap["GRU"])),
        Check(f"attention recalls over {long} tokens, with an accuracy above 0.9", f"{at_long_gap['attention']:.2f}",
              at_long_gap["attention"] > 0.9),
        Check(f"at depth {deepest} attention is more accurate than the plain RNN",
              observed(depth, -1, "RNN", "attention"), depth["attention"][-1][1] > depth["RNN"][-1][1]),
    ]  # fmt: skip
    plots = [
        Plot("gap in tokens", "accuracy", gap, "recall after a gap", "x"),
        Plot("depth", "accuracy", depth, "nested clauses", "x"),
    ]
    return Findings(table, checks, plots, f"At most {steps} steps each. Guessing: {1 / SYMBOLS}.")


def train(bench: Bench, task: str, make, difficulty: int, name: str, steps: int) -> float:
    torch.manual_seed(bench.seed)
    model = small_decoder(name, FIRST + 2 * SYMBOLS, 48)

    def batch(rng: torch.Generator) -> Batch:
        return make(rng, difficulty, **({"symbols": SYMBOLS} if make is recall_after_gap else {}))

    fit(bench, f"{task} {difficulty}, {name}", model, batch, steps, stop_below=0.02)
    test = generator(bench.seed + 1)
    return sum(accuracy(model, batch(test)) for _ in range(8)) / 8
