"""A fixed state is a budget: the more pairs a text tells, the fewer are recalled, while attention recalls them all.

Key and value, many times, then every key is asked for its value. One layer remembers: Mamba-2, one head, whose state
has 4 to 16 rows for 32 keys. If the state is what limits recall, accuracy falls with the number of pairs, and later the
larger the state is: N rows can tell N keys apart exactly, no more. Every model is trained once, on texts of 2 to 32
pairs, and tried at each number. A short convolution stands in front of attention; Mamba-2 has one of its own.

Arora et al. 2023, 2024; Jelassi et al. 2024. Sizes are small, so that pairs can outgrow states within minutes.
"""

# ledger: ssm.recall

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.contenders import MIXERS, spec
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.tasks import FIRST, associative_recall
from regard.parts.body import Body
from regard.parts.ssm.mamba2 import Mamba2

SYMBOLS, WIDTH = 64, 64
ROWS = (4, 8, 16)
STATES: dict[str, Body] = {f"{n * WIDTH:,} numbers": Mamba2(state=n, head_dim=WIDTH, expand=1) for n in ROWS}
MEMORIES = STATES | {"attention": MIXERS["attention"]}


def run(bench: Bench) -> Findings:
    steps, pairs = bench.pick(700, 2), bench.pick((2, 4, 8, 16, 32), (2, 4))
    lines = {name: recalled(bench, name, steps, pairs) for name in MEMORIES}
    table = [{"memory": name} | {f"{n} pairs": right for n, right in points} for name, points in lines.items()]
    at_most = {name: points[-1][1] for name, points in lines.items()}
    *_, largest, everything = at_most
    states = [right for name, right in at_most.items() if name != everything]
    few, many = (dict(lines[largest])[n] for n in (pairs[0], pairs[-1]))
    checks = [
        Check(f"of {pairs[-1]} pairs, a larger state recalls more", ", ".join(f"{r:.2f}" for r in states),
              all(a < b + 0.02 for a, b in zip(states, states[1:], strict=False)) and states[-1] > states[0] + 0.1),
        Check("even the largest, good at few pairs, falls as they grow", f"{few:.2f} of {pairs[0]}, {many:.2f} of "
              f"{pairs[-1]}", few > 0.9 and many < 0.8 * few),
        Check("attention recalls them all", f"{at_most[everything]:.2f}", at_most[everything] > 0.95),
    ]  # fmt: skip
    plots = [Plot("pairs", "accuracy", lines, "values recalled, by the state's size", "x")]
    return Findings(table, checks, plots, f"Guessing: {2 / SYMBOLS:.2f}. At most {steps} steps each.")


def recalled(bench: Bench, name: str, steps: int, pairs: tuple[int, ...]) -> list[tuple[float, float]]:
    torch.manual_seed(bench.seed)
    model = spec(MEMORIES[name], FIRST + SYMBOLS, WIDTH, 1, neighbours=name == "attention").build()

    def batch(draws: torch.Generator, told: int, tokens: int) -> Batch:
        return associative_recall(draws, told, tokens // (4 * told), SYMBOLS)

    def mixed(draws: torch.Generator) -> Batch:
        return batch(draws, pairs[int(torch.randint(len(pairs), (), generator=draws))], 1024)

    fit(bench, name, model, mixed, steps, 1e-2, enough=0.05)
    test = generator(bench.seed + 1)
    return [(n, accuracy(model, batch(test, n, bench.pick(8192, 512)))) for n in pairs]
