"""A recurrence keeps all it has read in one state, and past what that holds, new tokens overwrite old ones.

Key and value, many times, then every key is asked for its value, the newest first. The keys are the same in every text,
so that only values are to be kept, two bits a pair, and a recurrence can learn where in the state to keep them. Streams
are equally wide and only the state's width differs: if the state is what limits recall, accuracy stays up to some
number of pairs and falls behind it, later where the state is wider. Attention, which keeps every token, should not
fall. A new model for each number of pairs, all trained alike. Cho et al. 2014 saw it in translation.
"""

# ledger: anc.rnn.squeeze

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.contenders import MIXERS, spec
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.tasks import FIRST, draw, told_and_asked
from regard.parts.body import Body
from regard.parts.gru import GRU

VALUES, WIDTH = 4, 48
MEMORIES: dict[str, Body] = {
    "GRU, 4 numbers": GRU(hidden=4),
    "GRU, 16 numbers": GRU(hidden=16),
    "attention": MIXERS["attention"],
}


def run(bench: Bench) -> Findings:
    pairs, steps = bench.pick((1, 2, 4, 8, 16), (1, 2)), bench.pick(1000, 2)
    lines = {name: [(n, recalled(bench, name, n, steps)) for n in pairs] for name in MEMORIES}
    edges = {name: max((n for n, right in points if right > 0.9), default=0) for name, points in lines.items()}
    table = [
        {"memory": name} | {f"{n} pairs": right for n, right in points} | {"edge": edges[name]}
        for name, points in lines.items()
    ]
    narrow, wide, whole = MEMORIES
    last = {name: points[-1][1] for name, points in lines.items()}
    checks = [
        Check("the narrow state keeps a few pairs and loses many",
              f"{lines[narrow][0][1]:.2f} of {pairs[0]}, {last[narrow]:.2f} of {pairs[-1]}",
              lines[narrow][0][1] > 0.9 and last[narrow] < 0.7),
        Check("the wider state's edge lies further out", f"{edges[wide]} against {edges[narrow]} pairs",
              edges[wide] > edges[narrow]),
        Check("what keeps every token has no edge here", f"{last[whole]:.2f} of {pairs[-1]}", last[whole] > 0.9),
    ]  # fmt: skip
    plots = [Plot("pairs", "accuracy", lines, "values recalled", "x")]
    return Findings(table, checks, plots, f"Edge: most pairs of which nine in ten are recalled. Chance: {1 / VALUES}.")


def recalled(bench: Bench, name: str, pairs: int, steps: int) -> float:
    torch.manual_seed(bench.seed)
    model = spec(MEMORIES[name], FIRST + pairs + VALUES, WIDTH, 1, neighbours=True).build()

    def batch(draws: torch.Generator, rows: int = 32) -> Batch:
        keys = (FIRST + torch.arange(pairs)).expand(rows, pairs)
        values = pairs + draw(draws, VALUES, rows, pairs)
        return told_and_asked(keys, values, torch.arange(pairs).flip(0).expand(rows, pairs))

    fit(bench, f"{name}, {pairs} pairs", model, batch, steps, 5e-3, enough=0.02)
    return accuracy(model, batch(generator(bench.seed + 1), 256))
