"""Windows and linear attention change the exponent of n; FlashAttention computes the same n² and changes the constant.

One layer of causal attention, forward only, for sequences of 512 to 4,096 tokens: plain, which builds the n × n matrix
of scores; FlashAttention, torch's fused kernel for CPUs, which computes all scores and keeps none; a window of 128
tokens; and linear attention. Measured: seconds, largest tensor, and largest difference of the outputs from those of the
plain form with the same weights. Time that grows as n^e has e = 2 if every pair is computed and 1 if a fixed number per
token; what does not depend on n lowers e for short sequences.

Dao et al. 2022; Beltagy et al. 2020; Katharopoulos et al. 2020.
"""

# ledger: eff.constant

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.kernels.attention.patterns.window import Window
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.layout import TokenLayout
from regard.parts.attention import Attention, use_backend
from regard.parts.body import Body
from regard.parts.linear_attention import LinearAttention

WIDTH, HEADS, WINDOW = 64, 2, 128
WAYS: dict[str, tuple[Body, str]] = {  # mixer and backend
    "plain": (Attention(HEADS), "reference"),
    "FlashAttention": (Attention(HEADS), "sdpa"),
    "window": (Attention(HEADS, mask=Window(WINDOW)), "auto"),
    "linear": (LinearAttention(HEADS), "auto"),
}


class LargestAllocation(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns in this context."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def run(bench: Bench) -> Findings:
    lengths, rounds = bench.setting((512, 1024, 2048, 4096), (64, 128)), bench.setting(7, 1)
    ways = {name: build(bench.seed, mixer, backend) for name, (mixer, backend) in WAYS.items()}
    inputs = {n: torch.randn(1, n, WIDTH) for n in lengths}
    seconds: dict[tuple[str, int], list[float]] = {(name, n): [] for name in ways for n in lengths}
    largest = {}
    with torch.inference_mode():
        for name, n in seconds:  # also warms up
            with LargestAllocation() as allocations:
                ways[name](inputs[n], TokenLayout.whole(1, n))
            largest[name, n] = allocations.numel
        for _ in bench.each("rounds", range(rounds)):
            for name, n in seconds:
                layout = TokenLayout.whole(1, n)
                start = time.perf_counter()
                ways[name](inputs[n], layout)
                seconds[name, n].append(time.perf_counter() - start)
        n = lengths[1]
        outputs = {name: way(inputs[n], TokenLayout.whole(1, n)) for name, way in ways.items()}
    error = {name: (out - outputs["plain"]).abs().max().item() for name, out in outputs.items()}
    times = {key: statistics.median(values) for key, values in seconds.items()}
    first, last = lengths[1], lengths[-1]
    grown = {name: math.log(times[name, last] / times[name, first]) / math.log(last / first) if last > first else 0.0
             for name in ways}  # fmt: skip
    memory = {name: math.log(largest[name, last] / largest[name, lengths[0]]) / math.log(last / lengths[0])
              for name in ways}  # fmt: skip
    table = [
        {"attention": name, "exponent of time": grown[name], "exponent of the largest tensor": memory[name],
         "difference from plain": error[name]} | {f"ms at {n:,}": 1000 * times[name, n] for n in lengths}
        for name in ways
    ]  # fmt: skip
    span, flash = f"from {first:,} to {last:,} tokens", "FlashAttention"
    checks = [
        *(Check(f"{span} {name} has the exponent 2: above 1.5", f"n^{grown[name]:.2f}", grown[name] > 1.5)
          for name in ("plain", flash)),
        *(Check(f"{span} {name} has the exponent 1: below 1.5", f"n^{grown[name]:.2f}", grown[name] < 1.5)
          for name in ("window", "linear")),
        Check("FlashAttention changes the constant: faster than plain at every length, with the same output up to 1e-4",
              ", ".join(f"{times['plain', n] / times[flash, n]:.1f}x" for n in lengths) + f"; {error[flash]:.0e}",
              all(times[flash, n] < times["plain", n] for n in lengths) and error[flash] < 1e-4),
        Check("window and linear attention compute something else: their outputs differ by more than 1e-2",
              f"{error['window']:.2f} and {error['linear']:.2f}", min(error["window"], error["linear"]) > 1e-2),
        Check("the largest tensor grows as n² in the plain form alone: exponent above 1.9, the others' below 1.1",
              ", ".join(f"{name} {value:.2f}" for name, value in memory.items()),
              memory["plain"] > 1.9 and max(value for name, value in memory.items() if name != "plain") < 1.1),
    ]  # fmt: skip
    plots = [
        Plot("sequence length", "ms", {name: [(n, 1000 * times[name, n]) for n in lengths] for name in ways},
             "forward of one layer", "xy"),
        Plot("sequence length", "numbers", {name: [(n, largest[name, n]) for n in lengths] for name in ways},
             "largest tensor", "xy"),
    ]  # fmt: skip
    return Findings(table, checks, plots, f"Width {WIDTH}, {HEADS} heads. Medians of {rounds} rounds that alternate.")


def build(seed: int, mixer: Body, backend: str) -> nn.Module:
    torch.manual_seed(seed)  # the same weights for all
    layer = mixer.build(WIDTH).eval()
    if backend != "auto":
        use_backend(layer, backend)
    return layer
