"""A plain recurrence learns to recall over some ten tokens, gated ones over many more, attention over any distance.

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


def nested(draws: torch.Generator, depth: int, rows: int = 32) -> Batch:
    """Opening symbols, then their closing symbols in reverse: token FIRST + SYMBOLS + i closes FIRST + i."""
    opened = draw_symbols(draws, SYMBOLS, rows, depth)
    tokens = torch.cat([opened, opened.flip(1) + SYMBOLS], 1)
    targets = tokens.roll(-1, 1)
    weights = torch.zeros_like(tokens)
    weights[:, depth - 1 : -1] = 1
    return whole_rows(tokens, targets, weights)


TASKS = {"recall after a gap": recall_after_gap, "nested clauses": nested}


def run(bench: Bench) -> Findings:
    difficulties = {
        "recall after a gap": bench.pick((5, 10, 20, 40, 80), (2, 4)),
        "nested clauses": bench.pick((2, 4, 8, 12), (2, 3)),
    }
    steps = bench.training(1000, 2)
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {task: {name: [] for name in NAMES} for task in TASKS}
    for task, make in TASKS.items():
        for difficulty in difficulties[task]:
            for name in NAMES:
                lines[task][name].append((difficulty, train(bench, task, make, difficulty, name, steps)))
    gap, depth = lines["recall after a gap"], lines["nested clauses"]
    reach = {name: max((x for x, share in points if share > 0.9), default=0) for name, points in gap.items()}
    table = [
        {"mixer": name, "task": task} | {"gap or depth": x, "accuracy": share}
        for task, found in lines.items() for name, points in found.items() for x, share in points
    ]  # fmt: skip
    observed = ", ".join(f"{name} {tokens:g}" for name, tokens in reach.items())
    checks = [
        Check("the plain RNN reaches some ten tokens, fewer than the gated ones", observed,
              reach["RNN"] < min(reach["LSTM"], reach["GRU"]) and reach["RNN"] <= 20),
        Check("the gated ones reach more than twenty", observed, min(reach["LSTM"], reach["GRU"]) > 20),
        Check("attention reaches every gap", observed, reach["attention"] == difficulties["recall after a gap"][-1]),
        Check("at the greatest depth attention is more accurate than the plain RNN",
              f"{depth['attention'][-1][1]:.2f} and {depth['RNN'][-1][1]:.2f}",
              depth["attention"][-1][1] > depth["RNN"][-1][1]),
    ]  # fmt: skip
    plots = [
        Plot("tokens between", "accuracy", gap, "recall after a gap", "x"),
        Plot("depth", "accuracy", depth, "nested clauses", "x"),
    ]
    remark = f"Reach: the longest gap with an accuracy above 0.9 after {steps} steps."
    return Findings(table, checks, plots, remark)


def train(bench: Bench, task: str, make, difficulty: int, name: str, steps: int) -> float:
    torch.manual_seed(bench.seed)
    model = small_decoder(name, FIRST + 2 * SYMBOLS, 48)

    def batch(draws: torch.Generator) -> Batch:
        return make(draws, difficulty, **({"symbols": SYMBOLS} if make is recall_after_gap else {}))

    fit(bench, f"{task} {difficulty}, {name}", model, batch, steps, stop_below=0.02)
    test = generator(bench.seed + 1)
    return sum(accuracy(model, batch(test)) for _ in range(8)) / 8
