"""A recurrence keeps everything in one state, and beyond its capacity new tokens overwrite old ones.

Pairs of key and value, then every key again as a query for its value, the newest first. The keys are the same in every
sequence, so that only the values have to be stored, two bits per pair, and a recurrence can learn where in its state to
store them. The models have the same width and differ only in the width of the state. If the state limits recall, a
narrow state recalls one pair but few of many pairs, a wider state recalls more, and attention, which caches every
token, recalls all. A new model is trained for each number of pairs, all in the same way. Cho et al. 2014 observed the
limit in translation.
"""

# ledger: anc.rnn.squeeze

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import MIXERS, decoder_spec
from regard.labs.tasks import FIRST, draw_symbols, pairs_and_queries
from regard.parts.body import Body
from regard.parts.recurrent import GRU

VALUES, WIDTH = 4, 48
COMPARED: dict[str, Body] = {
    "GRU, 4 numbers": GRU(hidden=4),
    "GRU, 16 numbers": GRU(hidden=16),
    "attention": MIXERS["attention"],
}


def run(bench: Bench) -> Findings:
    pairs, steps = bench.setting((1, 4, 8), (1, 2)), bench.training(600, 2)
    lines = {name: [(n, train(bench, name, n, steps)) for n in pairs] for name in COMPARED}
    table = [{"memory": name} | {f"{n} pairs": share for n, share in points} for name, points in lines.items()]
    narrow, wide, attention = COMPARED
    one_pair, many = lines[narrow][0][1], {name: points[-1][1] for name, points in lines.items()}
    checks = [
        Check(f"the narrow state recalls one pair, and less than four fifths of {pairs[-1]}",
              f"{one_pair:.2f} and {many[narrow]:.2f}", one_pair > 0.9 and many[narrow] < 0.8),
        Check(f"of {pairs[-1]} pairs the wider state recalls at least 0.1 more than the narrow one",
              f"{many[wide]:.2f} and {many[narrow]:.2f}", many[wide] > many[narrow] + 0.1),
        Check(f"attention recalls at least nine tenths of {pairs[-1]} pairs", f"{many[attention]:.2f}",
              many[attention] > 0.9),
    ]  # fmt: skip
    plots = [Plot("pairs", "accuracy", lines, "values recalled", "x")]
    return Findings(table, checks, plots, f"Guessing: {1 / VALUES}. At most {steps} steps each.")


def train(bench: Bench, name: str, pairs: int, steps: int) -> float:
    torch.manual_seed(bench.seed)
    model = decoder_spec(COMPARED[name], FIRST + pairs + VALUES, WIDTH, 1, convolution=True).build()

    def batch(rng: torch.Generator, rows: int = 32) -> Batch:
        keys = (FIRST + torch.arange(pairs)).expand(rows, pairs)
        values = pairs + draw_symbols(rng, VALUES, rows, pairs)
        return pairs_and_queries(keys, values, torch.arange(pairs).flip(0).expand(rows, pairs))

    fit(bench, f"{name}, {pairs} pairs", model, batch, steps, 5e-3, stop_below=0.02)
    return accuracy(model, batch(generator(bench.seed + 1), 256))
