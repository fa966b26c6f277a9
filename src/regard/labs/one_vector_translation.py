"""One vector cannot hold a long sentence; attention removes the squeeze, and gains the more the longer the source.

A sequence of random symbols is to be written backwards. One LSTM reads it, another writes, and all that passes between
them is the last state (Sutskever et al. 2014); or the writer may also look back at every state of the reader (Luong et
al. 2015, the general score). Both are trained alike on sources of all lengths. Measured: the share written without one
mistake, by length of the source. What the chapters tell of 30, 40 and 100 words depends on width and language; here
the lengths are those at which this width gives way.
"""

# ledger: anc.seq2seq.squeeze

from typing import Literal

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import exact, fit, generator
from regard.labs.tasks import FIRST, draw, of_source
from regard.models.seq2seq import seq2seq
from regard.objectives.translation import translation

SYMBOLS, WIDTH = 16, 64
KINDS: dict[str, Literal["none", "general"]] = {"last state only": "none", "with attention": "general"}


def run(bench: Bench) -> Findings:
    lengths, steps = bench.pick((4, 8, 12, 16, 20, 24), (2, 3)), bench.pick(1500, 2)
    lines = {}
    for name, attention in KINDS.items():
        torch.manual_seed(bench.seed)
        model = seq2seq(FIRST + SYMBOLS, WIDTH, attention=attention).build()

        def batch(draws: torch.Generator) -> Batch:
            return backwards(draws, int(torch.randint(1, lengths[-1] + 1, (), generator=draws)))

        fit(bench, name, model, batch, steps, objective=translation)
        test = generator(bench.seed + 1)
        lines[name] = [(n, exact(model, backwards(test, n, 256))) for n in lengths]
    without, attending = lines.values()
    gaps = [b - a for (_, a), (_, b) in zip(without, attending, strict=True)]
    table = [
        {"source": n, "last state only": a, "with attention": b, "gap": b - a}
        for (n, a), (_, b) in zip(without, attending, strict=True)
    ]
    checks = [
        Check("one state is enough for the shortest", f"{without[0][1]:.2f}", without[0][1] > 0.9),
        Check("and fails at the longest", f"{without[-1][1]:.2f}", without[-1][1] < 0.1),
        Check("attention writes the longest too", f"{attending[-1][1]:.2f}", attending[-1][1] > 0.9),
        Check("the gap grows with length", " ".join(f"{gap:.2f}" for gap in gaps), gaps[-1] > gaps[0] + 0.5),
    ]
    plots = [Plot("length of the source", "exact match", lines, "written backwards")]
    return Findings(table, checks, plots)


def backwards(draws: torch.Generator, length: int, rows: int = 64) -> Batch:
    source = draw(draws, SYMBOLS, rows, length)
    return of_source(source, source.flip(1))
