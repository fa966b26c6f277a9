"""A recurrence reads one step after another, so its time grows with a text's length though the work is the same.

Only the time axis is serial: each step is still a product over batch and width. Measured: seconds of one training step
(forward and backward) at a fixed number of tokens, cut into ever fewer and longer texts. What is parallel over time and
linear, as a window is, takes the same time however the tokens are cut; a recurrence does not, for its n dependent steps
become smaller products. Attention, alone and over an LSTM, is shown and not judged: it slows down as well, but by its
n² scores and not by steps that wait for each other.
"""

# ledger: anc.rec.serial

import torch
from torch import Tensor

from regard.labs.bench import Bench
from regard.labs.contenders import MIXERS, block, contender, parameters
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import generator, interleaved
from regard.labs.tasks import FIRST, draw, texts
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token

SYMBOLS, WIDTH = 16, 128
NAMES = ("window", "RNN", "LSTM", "GRU", "attention")


def run(bench: Bench) -> Findings:
    torch.manual_seed(bench.seed)
    tokens = bench.pick(8192, 512)
    lengths = [n for n in (16, 64, 256, 1024, 4096) if n <= tokens // 2]
    models = {name: contender(name, FIRST + SYMBOLS, WIDTH) for name in NAMES}
    both = Repeat(tuple(block(MIXERS[name], WIDTH) for name in ("LSTM", "attention")))
    models["LSTM, attention"] = Decoder(FIRST + SYMBOLS, WIDTH, (both,)).build()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for length in bench.each("lengths", lengths):
        read = draw(generator(bench.seed), SYMBOLS, tokens // length, length)
        batch = texts(read, read, torch.ones_like(read))  # all count: gradients that fade to denormals would be slow

        def loss(model, batch=batch) -> Tensor:
            return next_token(model, batch)[0]

        for name, seconds in interleaved(models, loss, bench.pick(5, 1)).items():
            times[name].append((length, seconds))
    growth = {name: points[-1][1] / points[0][1] for name, points in times.items()}
    table = [
        {"mixer": name, "parameters": parameters(models[name])}
        | {f"n = {n:.0f}": seconds for n, seconds in points}
        | {"growth": growth[name]}
        for name, points in times.items()
    ]
    checks = [
        Check("the window, parallel and linear, takes at most half as long again in the longest texts",
              f"{growth['window']:.1f}x", growth["window"] < 1.5),
        *(Check(f"{name}: at least twice as long in the longest texts", f"{growth[name]:.1f}x", growth[name] > 2)
          for name in ("RNN", "LSTM", "GRU")),
    ]  # fmt: skip
    plots = [Plot("length of each text", "seconds a step", times, f"{tokens:,} tokens a step", "xy")]
    remark = (
        "How much a recurrence slows down depends on the kernel: on CPUs torch has one fused operation for all steps "
        "of an LSTM, none for the others. A machine with more lanes shows a larger difference: a GPU has thousands."
    )
    return Findings(table, checks, plots, remark)
