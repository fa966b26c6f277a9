"""One vector cannot hold a long sentence; attention removes the bottleneck, and gains more the longer the source.

A sequence of random symbols is to be generated in reverse. One LSTM encodes it; another one decodes and receives only
the last state (Sutskever et al. 2014) or also attends to every state of the encoder (Luong et al. 2015, the general
score). Both are trained in the same way on sources of all lengths. Measured: the share of sequences without a mistake,
by length of the source. The length at which a state fails depends on its width and on the data, so the lengths reported
for sentences (30, 40 or 100 tokens) are not expected here.
"""

# ledger: anc.seq2seq.squeeze

from typing import Literal

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import exact_match, fit, generator
from regard.labs.tasks import FIRST, draw_symbols, encoder_decoder_batch
from regard.models.seq2seq import seq2seq
from regard.objectives.translation import translation

SYMBOLS, WIDTH = 16, 64
SCORES: dict[str, Literal["none", "general"]] = {"last state only": "none", "with attention": "general"}


def run(bench: Bench) -> Findings:
    lengths, steps = bench.setting((4, 8, 12, 16, 20, 24), (2, 3)), bench.training(1500, 2)
    lines = {}
    for name, attention in SCORES.items():
        torch.manual_seed(bench.seed)
        model = seq2seq(FIRST + SYMBOLS, WIDTH, attention=attention).build()

        def batch(rng: torch.Generator) -> Batch:
            return reversal(rng, int(torch.randint(1, lengths[-1] + 1, (), generator=rng)))

        fit(bench, name, model, batch, steps, objective=translation)
        test = generator(bench.seed + 1)
        lines[name] = [(n, exact_match(model, reversal(test, n, 256))) for n in lengths]
    last_state, attending = lines.values()
    gaps = [b - a for (_, a), (_, b) in zip(last_state, attending, strict=True)]
    table = [
        {"source": n, "last state only": a, "with attention": b, "gap": b - a}
        for (n, a), (_, b) in zip(last_state, attending, strict=True)
    ]
    checks = [
        Check("one state suffices for the shortest source", f"{last_state[0][1]:.2f}", last_state[0][1] > 0.9),
        Check("one state fails at the longest source", f"{last_state[-1][1]:.2f}", last_state[-1][1] < 0.1),
        Check("attention solves the longest source too", f"{attending[-1][1]:.2f}", attending[-1][1] > 0.9),
        Check("the gap grows with length", " ".join(f"{gap:.2f}" for gap in gaps), gaps[-1] > gaps[0] + 0.5),
    ]
    plots = [Plot("length of the source", "exact match", lines, "reversed sequences")]
    return Findings(table, checks, plots)


def reversal(rng: torch.Generator, length: int, rows: int = 64) -> Batch:
    source = draw_symbols(rng, SYMBOLS, rows, length)
    return encoder_decoder_batch(source, source.flip(1))
