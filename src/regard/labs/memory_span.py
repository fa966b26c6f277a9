"""How far back a mixer can learn to look: a plain recurrence some ten tokens, gated ones many more, attention anywhere.

Two tasks with a dial. Recall after a gap: which symbol stood first, with so many others in between. Nested clauses: an
opening bracket of one of several kinds for every clause, then they close in reverse order, and each closing must agree
with its opening (the rat that the cat that the dog chased bit ran): the dial is the depth. All are trained alike, a new
model for each setting of the dial.
"""

# ledger: anc.rnn.span

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.contenders import contender
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.tasks import FIRST, draw, recall_after_gap, texts

NAMES = ("RNN", "LSTM", "GRU", "attention")
SYMBOLS = 8


def nested(draws: torch.Generator, depth: int, rows: int = 32) -> Batch:
    """Openings, then their closings in reverse: token FIRST + SYMBOLS + i closes FIRST + i."""
    opened = draw(draws, SYMBOLS, rows, depth)
    tokens = torch.cat([opened, opened.flip(1) + SYMBOLS], 1)
    targets = tokens.roll(-1, 1)
    weights = torch.zeros_like(tokens)
    weights[:, depth - 1 : -1] = 1
    return texts(tokens, targets, weights)


TASKS = {"recall after a gap": recall_after_gap, "nested clauses": nested}


def run(bench: Bench) -> Findings:
    dials = {
        "recall after a gap": bench.pick((5, 10, 20, 40, 80), (2, 4)),
        "nested clauses": bench.pick((2, 4, 8, 12), (2, 3)),
    }
    steps = bench.pick(1000, 2)
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {task: {name: [] for name in NAMES} for task in TASKS}
    for task, make in TASKS.items():
        for dial in dials[task]:
            for name in NAMES:
                lines[task][name].append((dial, learned(bench, task, make, dial, name, steps)))
    gap, depth = lines["recall after a gap"], lines["nested clauses"]
    reach = {name: max((x for x, right in points if right > 0.9), default=0) for name, points in gap.items()}
    table = [
        {"mixer": name, "task": task} | {"dial": x, "accuracy": right}
        for task, found in lines.items() for name, points in found.items() for x, right in points
    ]  # fmt: skip
    checks = [
        Check("the plain RNN reaches some ten tokens, less than the gated ones", told(reach),
              reach["RNN"] < min(reach["LSTM"], reach["GRU"]) and reach["RNN"] <= 20),
        Check("the gated ones reach further than twenty", told(reach), min(reach["LSTM"], reach["GRU"]) > 20),
        Check("attention reaches every gap", told(reach), reach["attention"] == dials["recall after a gap"][-1]),
        Check("at the deepest nesting attention beats the plain RNN",
              f"{depth['attention'][-1][1]:.2f} against {depth['RNN'][-1][1]:.2f}",
              depth["attention"][-1][1] > depth["RNN"][-1][1]),
    ]  # fmt: skip
    plots = [
        Plot("tokens between", "accuracy", gap, "recall after a gap", "x"),
        Plot("depth", "accuracy", depth, "nested clauses", "x"),
    ]
    return Findings(table, checks, plots, f"Reach: the longest gap recalled in nine of ten texts after {steps} steps.")


def told(reach: dict[str, float]) -> str:
    return ", ".join(f"{name} {tokens:g}" for name, tokens in reach.items())


def learned(bench: Bench, task: str, make, dial: int, name: str, steps: int) -> float:
    torch.manual_seed(bench.seed)
    model = contender(name, FIRST + 2 * SYMBOLS, 48)

    def batch(draws: torch.Generator) -> Batch:
        return make(draws, dial, **({"symbols": SYMBOLS} if make is recall_after_gap else {}))

    fit(bench, f"{task} {dial}, {name}", model, batch, steps, enough=0.02)
    test = generator(bench.seed + 1)
    return sum(accuracy(model, batch(test)) for _ in range(8)) / 8
