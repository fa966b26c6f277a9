"""Sparse attention compared with PyTorch's dense kernel on this CPU: `python -m benchmarks.patterns` prints JSON.

Float32, 8 heads of 64, one row; forward, and forward with backward, interleaved. A window is compared with *causal*
attention, patterns with global tokens with the same kernel and the same mask as a tensor. Masks are computed before the
timing on both sides, as a model computes them once for all its layers. Memory is the peak of a process beyond its
inputs, masks included, compared with the bytes of all scores of dense attention. Statistics are compared with the tiled
forward that computes them. Measure on an idle machine: short tasks on several threads wait for each other.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import interleave
from regard.kernels.attention import block_sparse, tiled
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal, Mask
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.statistics import attend_with_statistics
from regard.layout import TokenLayout

HEADS, DIM = 8, 64
PATTERNS: dict[str, tuple[Mask, int]] = {
    "window": (Window(256), 8192),
    "longformer": (Longformer(256, 16), 4096),
    "bigbird": (BigBird(64, window=3, globals=2, random=3, length=4096), 4096),
}

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3)]


def sparse(mask: Mask, length: int) -> AttentionFunction:
    layout = TokenLayout.whole(1, length)  # caches its masks, as for the layers of a model
    return lambda q, k, v: block_sparse.attend(q, k, v, layout, ScoreOptions(mask, DIM**-0.5))


def dense(mask: Mask, length: int) -> AttentionFunction:
    if isinstance(mask, Window):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    positions = torch.arange(length)
    allowed = mask.allows(positions.unsqueeze(-1), positions)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def forward(attend: AttentionFunction, tensors: list[Tensor]) -> Callable[[], object]:
    return torch.no_grad()(lambda: attend(*tensors))


def forward_backward(attend: AttentionFunction, tensors: list[Tensor]) -> Callable[[], object]:
    weights = torch.randn(1, HEADS, tensors[0].shape[2], DIM)
    return lambda: torch.autograd.grad(attend(*tensors), tensors, weights)


def speed(name: str, rounds: int) -> dict[str, object]:
    mask, length = PATTERNS[name]
    tensors, result = inputs(length), {}
    for direction, run in {"forward": forward, "forward and backward": forward_backward}.items():
        candidates = {"block_sparse": sparse(mask, length), "dense": dense(mask, length)}
        rates = interleave({name: run(attend, tensors) for name, attend in candidates.items()}, rounds, length)
        result[direction] = {"tokens_per_second": rates, "ratio": round(rates["block_sparse"] / rates["dense"], 2)}
    return result


def peak(name: str) -> dict[str, object]:
    """Peak resident bytes of forward and backward beyond the inputs, measured in its own process."""
    command = [sys.executable, "-m", "benchmarks.patterns", "--peak", name]
    extra = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    scores = 4 * HEADS * PATTERNS[name][1] ** 2
    return {"peak_bytes": extra, "full_scores_bytes": scores, "share": round(extra / scores, 3)}


def print_peak(name: str) -> None:
    mask, length = PATTERNS[name]
    forward_backward(sparse(mask, 512), inputs(512))()  # a warm-up, which includes lazy imports
    tensors = inputs(length)
    run, before = forward_backward(sparse(mask, length), tensors), resident("VmRSS")
    run()
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Bytes of resident memory on Linux: VmRSS is the current value, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def statistics(rounds: int, length: int = 4096) -> dict[str, object]:
    layout, options, tensors = TokenLayout.whole(1, length), ScoreOptions(Causal(), DIM**-0.5), inputs(length)
    candidates = {
        "tiled": forward(lambda q, k, v: tiled.attend(q, k, v, layout, options), tensors),
        "with statistics": forward(lambda q, k, v: attend_with_statistics(q, k, v, layout, options)[0], tensors),
    }
    rates = interleave(candidates, 6 * rounds, length)  # more rounds: the difference is small
    return {"tokens_per_second": rates, "cost": round(rates["tiled"] / rates["with statistics"] - 1, 3)}


def measure(rounds: int = 7) -> dict[str, object]:
    result: dict[str, object] = {name: speed(name, rounds) | {"memory": peak(name)} for name in PATTERNS}
    return result | {"statistics": statistics(rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", choices=PATTERNS, help="print only this pattern's peak bytes")
    arguments = parser.parse_args()
    if arguments.peak:
        return print_peak(arguments.peak)
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps({"machine": machine, "patterns": measure(arguments.rounds)}, indent=2))


if __name__ == "__main__":
    main()
