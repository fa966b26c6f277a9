"""A fixed state is a budget: the more pairs a sequence has, the fewer are recalled, while attention recalls them all.

Pairs of key and value, then every key again as a query for its value. The model has one layer of Mamba-2 with one head,
whose state has 4 to 16 rows for 32 keys. If the state limits recall, accuracy falls with the number of pairs, and
with a larger state it starts to fall at more pairs: N rows distinguish at most N keys exactly. Every model is trained
once, on sequences of 2 to 32 pairs, and evaluated at each number. A short convolution precedes attention; Mamba-2
contains one.

Arora et al. 2023, 2024; Jelassi et al. 2024. The sizes are small, so that the pairs exceed the states within minutes.
"""

# ledger: ssm.recall

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import MIXERS, decoder_spec
from regard.labs.tasks import FIRST, associative_recall
from regard.parts.body import Body
from regard.parts.ssm.mamba2 import Mamba2

SYMBOLS, WIDTH = 64, 64
STATE_ROWS = (4, 8, 16)
STATES: dict[str, Body] = {f"{n * WIDTH:,} numbers": Mamba2(state=n, head_dim=WIDTH, expand=1) for n in STATE_ROWS}
COMPARED = STATES | {"attention": MIXERS["attention"]}


def run(bench: Bench) -> Findings:
    steps, pairs = bench.training(700, 2), bench.setting((2, 4, 8, 16, 32), (2, 4))
    lines = {name: train(bench, name, steps, pairs) for name in COMPARED}
    table = [{"memory": name} | {f"{n} pairs": share for n, share in points} for name, points in lines.items()]
    at_max_pairs = {name: points[-1][1] for name, points in lines.items()}
    *_, largest, attention = at_max_pairs
    states = [share for name, share in at_max_pairs.items() if name != attention]
    few, many = (dict(lines[largest])[n] for n in (pairs[0], pairs[-1]))
    checks = [
        Check(f"of {pairs[-1]} pairs, a larger state recalls more", ", ".join(f"{share:.2f}" for share in states),
              all(a < b + 0.02 for a, b in zip(states, states[1:], strict=False)) and states[-1] > states[0] + 0.1),
        Check("the largest state recalls few pairs well, but a smaller share of many",
              f"{few:.2f} of {pairs[0]}, {many:.2f} of {pairs[-1]}", few > 0.9 and many < 0.8 * few),
        Check(f"attention recalls all of {pairs[-1]} pairs", f"{at_max_pairs[attention]:.2f}",
              at_max_pairs[attention] > 0.95),
    ]  # fmt: skip
    plots = [Plot("pairs", "accuracy", lines, "values recalled, by size of the state", "x")]
    return Findings(table, checks, plots, f"Guessing: {2 / SYMBOLS:.2f}. At most {steps} steps each.")


def train(bench: Bench, name: str, steps: int, pairs: tuple[int, ...]) -> list[tuple[float, float]]:
    """The accuracy for each number of pairs, after training on all of them."""
    torch.manual_seed(bench.seed)
    model = decoder_spec(COMPARED[name], FIRST + SYMBOLS, WIDTH, 1, convolution=name == "attention").build()

    def batch(rng: torch.Generator, pairs: int, tokens: int) -> Batch:
        return associative_recall(rng, pairs, tokens // (4 * pairs), SYMBOLS)

    def mixed(rng: torch.Generator) -> Batch:
        return batch(rng, pairs[int(torch.randint(len(pairs), (), generator=rng))], 1024)

    fit(bench, name, model, mixed, steps, 1e-2, stop_below=0.05)
    test = generator(bench.seed + 1)
    return [(n, accuracy(model, batch(test, n, bench.setting(8192, 512)))) for n in pairs]
