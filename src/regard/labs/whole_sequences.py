"""Matrix products over whole sequences suit GPUs: a transformer gains more from a GPU than a recurrence does.

Measured on every device of the machine, in float32 on CPUs and bfloat16 on GPUs: the fastest product of two large
square matrices, which is the peak; products of a matrix with 1 to 8,192 rows (a token, or all tokens of a batch) and a
square one; and tokens per second of training a transformer, an LSTM and a GRU of the same width and about the same
number of parameters on the same rows. The share of the peak counts 6 operations per parameter of a product and token
(Kaplan et al. 2020). That transformers became large because of this is history and cannot be measured here.
"""

# ledger: tr.gpu

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator
from regard.labs.small_models import MIXERS, matched_spec, parameter_count
from regard.labs.tasks import draw_symbols, whole_rows
from regard.objectives.next_token import next_token
from regard.training.step import autocast

SYMBOLS, NAMES = 64, ("attention", "LSTM", "GRU")


def run(bench: Bench) -> Findings:
    torch.manual_seed(bench.seed)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    width, rows, length = bench.setting((512, 16, 512), (32, 2, 16))
    side = bench.setting(2048, 64)
    rates = {device: product_rates(bench, device, side) for device in devices}
    peaks = {device: peak(bench, device) for device in devices}
    symbols = draw_symbols(generator(bench.seed), SYMBOLS - 2, rows, length)
    speeds: dict[str, dict[str, float]] = {device: {} for device in devices}
    shares: dict[str, dict[str, float]] = {device: {} for device in devices}
    for device in bench.each("devices", devices):
        batch = whole_rows(symbols, symbols, torch.ones_like(symbols)).to(torch.device(device))
        for name in NAMES:
            model = (
                matched_spec(MIXERS[name], MIXERS["attention"], SYMBOLS, width, bench.setting(4, 1)).build().to(device)
            )

            def step(model=model, batch=batch) -> None:
                with autocast("auto", torch.device(device))():  # noqa: B023
                    loss = next_token(model, batch)[0]
                loss.backward()
                model.zero_grad()

            speeds[device][name] = symbols.numel() / median_seconds(device, step, bench.setting(3, 1))
            work = 6 * (parameter_count(model) - parameter_count(model.embedding)) * speeds[device][name]
            shares[device][name] = work / peaks[device]
    table = [
        {"device": device_name(device), "peak TFLOP/s": peaks[device] / 1e12}
        | {f"{n:,} rows": rate / peaks[device] for n, rate in rates[device]}
        | {f"{name}, tokens/s": speeds[device][name] for name in NAMES}
        | {f"{name}, share": shares[device][name] for name in NAMES}
        for device in devices
    ]  # fmt: skip
    gains = {name: speeds[devices[-1]][name] / speeds["cpu"][name] for name in NAMES}
    gpu, last = "cuda" in devices, devices[-1]
    one, most = (rates[last][index][1] / peaks[last] for index in (0, -1))
    expected = {
        "one row is less than 2 % of the peak of the GPU, and the most rows more than half of it":
            (f"{one:.4f} and {most:.2f} of {peaks[last] / 1e12:.0f} TFLOP/s ({device_name(last)})",
             one < 0.02 and most > 0.5),
        "the GPU trains the transformer at least ten times as fast as the CPU":
            (f"{gains['attention']:.0f}x", gains["attention"] >= 10),
        "the GPU makes the transformer faster by a larger factor than the LSTM and the GRU":
            (", ".join(f"{name} {gain:.0f}x" for name, gain in gains.items()),
             gains["attention"] > max(gains["LSTM"], gains["GRU"])),
        "on the GPU the transformer has a larger share of the peak than the LSTM and the GRU":
            (", ".join(f"{name} {share:.3f}" for name, share in shares[last].items()),
             shares[last]["attention"] > max(shares[last]["LSTM"], shares[last]["GRU"])),
    }  # fmt: skip
    checks = [Check(text, observed if gpu else "no GPU", gpu and holds) for text, (observed, holds) in expected.items()]
    lines = {device: [(n, rate / 1e12) for n, rate in rates[device]] for device in devices}
    by_model = {device: [(i, shares[device][name]) for i, name in enumerate(NAMES)] for device in devices}
    plots = [
        Plot("rows of the product", "TFLOP/s", lines, f"rows x {side} by {side} x {side}", "xy"),
        Plot("", "share of the peak", by_model, "training", groups=NAMES),
    ]
    return Findings(table, checks, plots, "The verdict needs a GPU; without one, no prediction can hold.")


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def median_seconds(device: str, action: Callable[[], object], rounds: int) -> float:
    """Of `rounds` timed calls after a warm-up. On a GPU one measurement is ten calls, because they are asynchronous."""
    calls, seconds = 10 if device == "cuda" else 1, []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            action()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds[1:])


def product_rates(bench: Bench, device: str, side: int) -> list[tuple[float, float]]:
    """Operations per second of products with a square matrix, by number of rows."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer, rates = nn.Linear(side, side, bias=False).to(device, dtype), []
    with torch.no_grad():
        for rows in bench.setting((1, 8, 64, 512, 8192), (1, 8)):
            x = torch.randn(rows, side).to(device, dtype)
            seconds = median_seconds(device, lambda x=x: layer(x), bench.setting(20, 1))
            rates.append((rows, 2 * rows * side * side / seconds))
    return rates


def peak(bench: Bench, device: str) -> float:
    """Operations per second of the product of two square matrices."""
    size = bench.setting(8192 if device == "cuda" else 2048, 64)
    x = torch.randn(size, size).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    return 2 * size**3 / median_seconds(device, lambda: x @ x, bench.setting(5, 1))
