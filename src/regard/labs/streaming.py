"""A state space decodes with the same memory and time for any sequence length; attention needs more of both.

Measured with the engine's contiguous store: the bytes of the store for a sequence of n tokens, and the seconds of its
last token. Stores are filled with noise instead of the states of n tokens, because the work does not depend on the
values. All mixers alternate at all lengths, so that the machine's load affects all equally. A fixed state is not
necessarily small: it may be larger than the cache of attention for a short sequence.
"""

# ledger: ssm.stream

import statistics
import time

import torch

from regard.engine.stores.contiguous import Contiguous
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.small_models import small_decoder
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule

NAMES = ("attention", "S4D", "Mamba", "Mamba-2")
WIDTH, VOCAB = 256, 256


class Stream:
    """A sequence of n tokens, whose last token is computed repeatedly."""

    def __init__(self, model: DecoderModule, n: int):
        self.model, self.last = model, torch.full((1, 1), n - 1)
        self.store = Contiguous(model.spec.memory(), 1, n, torch.float32)
        self.arrays = [array for storage in self.store.storages for array in storage.arrays.values()]
        for array in self.arrays:
            array.normal_()

    @property
    def size(self) -> int:
        """Bytes of the store."""
        return sum(array.nbytes for array in self.arrays)

    @torch.inference_mode()
    def step(self) -> float:
        """Seconds of one token."""
        start = time.perf_counter()
        layout = TokenLayout(self.last)
        self.model(torch.zeros(1, 1, dtype=torch.int64), layout, self.store.begin_forward(layout, check=False))
        return time.perf_counter() - start


def run(bench: Bench) -> Findings:
    torch.manual_seed(bench.seed)
    lengths, rounds = bench.setting((256, 1024, 4096, 16384, 65536), (16, 64)), bench.setting(100, 3)
    models = {name: small_decoder(name, VOCAB, WIDTH).eval() for name in NAMES}
    streams = {(name, n): Stream(model, n) for name, model in models.items() for n in lengths}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in streams}
    for _ in bench.each("tokens", range(rounds)):
        for key, stream in streams.items():
            seconds[key].append(stream.step())
    times = {key: 1000 * statistics.median(durations) for key, durations in seconds.items()}
    table = [
        {"mixer": name, "n": n, "MB": stream.size / 1e6, "ms per token": times[name, n]}
        for (name, n), stream in streams.items()
    ]
    first, last = lengths[0], lengths[-1]
    sizes = {name: [(n, streams[name, n].size / 1e6) for n in lengths] for name in NAMES}
    speeds = {name: [(n, times[name, n]) for n in lengths] for name in NAMES}
    slowdown = {name: times[name, last] / times[name, first] for name in NAMES}
    growth = sizes["attention"][-1][1] / sizes["attention"][0][1]
    state_spaces, observed = NAMES[1:], ", ".join(f"{name} {times[name, last]:.2f} ms" for name in NAMES)
    checks = [
        Check("state spaces need the same bytes at every n",
              ", ".join(f"{name} {1000 * sizes[name][-1][1]:.0f} KB" for name in state_spaces),
              all(len({size for _, size in sizes[name]}) == 1 for name in state_spaces)),
        Check("state spaces take at most a fifth longer at the largest n than at the smallest",
              ", ".join(f"{name} {slowdown[name]:.2f}x" for name in state_spaces),
              all(slowdown[name] < 1.2 for name in state_spaces)),
        Check("attention's memory grows with n", f"{growth:.0f}x for {last // first}x", growth > 0.5 * last / first),
        Check("attention's time more than triples", f"{slowdown['attention']:.1f}x", slowdown["attention"] > 3),
        Check(f"at {last:,} tokens each state space is faster than attention", observed,
              max(times[name, last] for name in state_spaces) < times["attention", last]),
    ]  # fmt: skip
    plots = [
        Plot("sequence length", "MB", sizes, "memory of one sequence", "xy"),
        Plot("sequence length", "ms", speeds, "time of the last token", "xy"),
    ]
    return Findings(table, checks, plots, f"Width {WIDTH}, 2 layers, one sequence. Medians of {rounds} rounds.")
