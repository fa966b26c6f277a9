"""A recurrence computes one step after another, so its time grows with the sequence length for the same work.

Only the time axis is serial: each step is still a product over batch and width. Measured: seconds of one training step
(forward and backward) for a fixed number of tokens, in fewer and longer sequences. A window, which is parallel over
time and linear, takes the same time for every length; a recurrence does not, because its n dependent steps become
smaller products. Attention, also after an LSTM, is shown and not judged: it slows down too, but because of its n²
scores and not because of dependent steps.
"""

# ledger: anc.rec.serial

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator, step_seconds
from regard.labs.small_models import MIXERS, mixer_block, parameter_count, small_decoder
from regard.labs.tasks import FIRST, draw_symbols, whole_rows
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token

SYMBOLS, WIDTH = 16, 128
NAMES = ("window", "RNN", "LSTM", "GRU", "attention")


def run(bench: Bench) -> Findings:
    torch.manual_seed(bench.seed)
    tokens = bench.setting(8192, 512)
    lengths = [n for n in (16, 64, 256, 1024, 4096) if n <= tokens // 2]
    models = {name: small_decoder(name, FIRST + SYMBOLS, WIDTH) for name in NAMES}
    layers = Repeat(tuple(mixer_block(MIXERS[name], WIDTH) for name in ("LSTM", "attention")))
    models["LSTM, attention"] = Decoder(FIRST + SYMBOLS, WIDTH, (layers,)).build()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for length in bench.each("lengths", lengths):
        symbols = draw_symbols(generator(bench.seed), SYMBOLS, tokens // length, length)
        # Every token has a weight: with few, gradients decay to denormal numbers, which are slow on CPUs.
        batch = whole_rows(symbols, symbols, torch.ones_like(symbols))

        def loss(model, batch=batch) -> Tensor:
            return next_token(model, batch)[0]

        for name, seconds in step_seconds(models, loss, bench.setting(5, 1)).items():
            times[name].append((length, seconds))
    growth = {name: points[-1][1] / points[0][1] for name, points in times.items()}
    table = [
        {"mixer": name, "parameters": parameter_count(models[name])}
        | {f"n = {n:.0f}": seconds for n, seconds in points}
        | {"growth": growth[name]}
        for name, points in times.items()
    ]
    checks = [
        Check("the window, parallel and linear, takes less than 1.5 times as long for the longest sequences",
              f"{growth['window']:.1f}x", growth["window"] < 1.5),
        *(Check(f"{name}: more than twice as long for the longest sequences", f"{growth[name]:.1f}x", growth[name] > 2)
          for name in ("RNN", "LSTM", "GRU")),
    ]  # fmt: skip
    plots = [Plot("sequence length", "seconds per step", times, f"{tokens:,} tokens per step", "xy")]
    remark = (
        "How much a recurrence slows down depends on the kernel: on CPUs torch has one fused operation for all steps "
        "of an LSTM, none for the others. A machine with more parallel units, such as a GPU, shows a larger difference."
    )
    return Findings(table, checks, plots, remark)
