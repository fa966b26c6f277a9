"""A recurrence reads one step after another, so its time grows with a text's length though the work is the same.

Only the time axis is serial: each step is still a product over batch and width. Measured: seconds of one training step
(forward and backward) at a fixed number of tokens, cut into ever fewer and longer texts. What is parallel over time
takes the same time however the tokens are cut (attention: until its n² shows); a recurrence does not, for its n
dependent steps become smaller products. A layer of LSTM under one of attention is still serial.
"""

# ledger: anc.rec.serial

import torch
from torch import Tensor

from regard.labs.bench import Bench
from regard.labs.contenders import MIXERS, block, contender, parameters
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import generator, interleaved
from regard.labs.tasks import FIRST, recall_after_gap
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token

SYMBOLS, WIDTH = 16, 128
NAMES = ("RNN", "LSTM", "GRU", "attention")


def run(bench: Bench) -> Findings:
    torch.manual_seed(bench.seed)
    tokens = bench.pick(8192, 512)
    lengths = [n for n in (16, 64, 256, 1024, 4096) if n <= tokens // 2]
    models = {name: contender(name, FIRST + SYMBOLS, WIDTH) for name in NAMES}
    both = Repeat(tuple(block(MIXERS[name], WIDTH) for name in ("LSTM", "attention")))
    models["LSTM, attention"] = Decoder(FIRST + SYMBOLS, WIDTH, (both,)).build()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for length in bench.each("lengths", lengths):
        batch = recall_after_gap(generator(bench.seed), length - 2, tokens // length, SYMBOLS)

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
    serial = min(grown for name, grown in growth.items() if name != "attention")
    checks = [
        Check(
            "whatever holds a recurrence slows down more than attention, n² and all",
            ", ".join(f"{name} {grown:.1f}x" for name, grown in growth.items()),
            serial > growth["attention"],
        ),
        Check("and takes at least twice as long at the longest", f"{serial:.1f}x at least", serial > 2),
    ]
    plots = [Plot("length of each text", "seconds a step", times, f"{tokens:,} tokens a step", "xy")]
    return Findings(
        table, checks, plots, "The wider the machine, the larger the difference: a GPU has thousands of lanes."
    )
