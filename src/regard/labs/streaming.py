"""A state space decodes with the same memory and time however long the text; attention needs more of both.

Measured with the engine's contiguous store: the bytes that the store holds for a text of n tokens, and the seconds that
its last token takes. Stores are filled with noise instead of reading n tokens first, for the work does not depend on
the numbers. All mixers at all lengths take turns, so that all see the same machine. A fixed state is not a small one:
it may be larger than attention's cache of a short text.
"""

# ledger: ssm.stream

import statistics
import time

import torch

from regard.engine.stores.contiguous import Contiguous
from regard.labs.bench import Bench
from regard.labs.contenders import contender
from regard.labs.findings import Check, Findings, Plot
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule

NAMES = ("attention", "S4D", "Mamba", "Mamba-2")
WIDTH, VOCAB = 256, 256


class Stream:
    """A text of n tokens, the last of which is read again and again."""

    def __init__(self, model: DecoderModule, n: int):
        self.model, self.last = model, torch.full((1, 1), n - 1)
        self.store = Contiguous(model.spec.memory(), 1, n, torch.float32)
        self.arrays = [array for storage in self.store.storages for array in storage.arrays.values()]
        for array in self.arrays:
            array.normal_()

    @property
    def size(self) -> int:
        """Bytes."""
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
    lengths, rounds = bench.pick((256, 1024, 4096, 16384, 65536), (16, 64)), bench.pick(100, 3)
    models = {name: contender(name, VOCAB, WIDTH).eval() for name in NAMES}
    streams = {(name, n): Stream(model, n) for name, model in models.items() for n in lengths}
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in streams}
    for _ in bench.each("tokens", range(rounds)):
        for key, stream in streams.items():
            taken[key].append(stream.step())
    times = {key: 1000 * statistics.median(seconds) for key, seconds in taken.items()}
    table = [
        {"mixer": name, "n": n, "memory in MB": stream.size / 1e6, "milliseconds a token": times[name, n]}
        for (name, n), stream in streams.items()
    ]
    first, last = lengths[0], lengths[-1]
    sizes = {name: [(n, streams[name, n].size / 1e6) for n in lengths] for name in NAMES}
    speeds = {name: [(n, times[name, n]) for n in lengths] for name in NAMES}
    slower = {name: times[name, last] / times[name, first] for name in NAMES}
    more = sizes["attention"][-1][1] / sizes["attention"][0][1]
    flat, told = NAMES[1:], ", ".join(f"{name} {times[name, last]:.2f} ms" for name in NAMES)
    checks = [
        Check("state spaces hold the same bytes at every n",
              ", ".join(f"{name} {1000 * sizes[name][-1][1]:.0f} KB" for name in flat),
              all(len({size for _, size in sizes[name]}) == 1 for name in flat)),
        Check("they take no longer at the largest n than at the smallest, within a fifth",
              ", ".join(f"{name} {slower[name]:.2f}x" for name in flat), all(slower[name] < 1.2 for name in flat)),
        Check("attention's memory grows as n does", f"{more:.0f}x for {last // first}x", more > 0.5 * last / first),
        Check("attention's time grows, at least threefold", f"{slower['attention']:.1f}x", slower["attention"] > 3),
        Check(f"at {last:,} tokens each state space is faster than attention", told,
              max(times[name, last] for name in flat) < times["attention", last]),
    ]  # fmt: skip
    plots = [
        Plot("tokens of the text", "MB", sizes, "memory of one text", "xy"),
        Plot("tokens of the text", "milliseconds", speeds, "time of the last token", "xy"),
    ]
    return Findings(table, checks, plots, f"{WIDTH} wide, 2 layers, one text. Medians of {rounds} turns.")
