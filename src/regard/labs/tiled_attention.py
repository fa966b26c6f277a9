"""Tiled attention takes a half to a quarter of the time of plain attention, and not only because of memory traffic.

Attention over random vectors, forward and backward, full and causal. Plain attention writes the n × n scores and
weights to memory and reads them again; the tiled kernel of PyTorch keeps them in tiles, with a running maximum and sum.
If the traffic were the only cause, both masks would gain alike. But a causal kernel also skips the tiles above the
diagonal, half of all, which plain attention computes and masks: the full mask shows the traffic, the causal one both.

All alternate, on a GPU in bf16 if there is one, else on the CPU in float32. Dao et al. 2022, who measured an A100. On
an H200 a test of the Triton kernels requires more than a factor of 2 at 1,024 to 8,192 tokens.
"""

# ledger: flash.speed

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.labs.experiment import Bench, Check, Findings, Plot

HEADS, DIM = 8, 64
LENGTHS = (256, 512, 1024, 2048, 4096)
MASKS = ("full", "causal")
TimedAttention = Mapping[tuple[str, str], Callable[..., Tensor]]  # by implementation and mask


def run(bench: Bench) -> Findings:
    lengths, rounds = bench.setting(LENGTHS, (32, 64)), bench.setting(5, 2)
    torch.manual_seed(bench.seed)
    milliseconds: dict[tuple[str, str, int], float] = {}
    for length in bench.each("lengths", lengths):
        candidates = {(kind, mask): partial(ATTENTION[kind], causal=mask == "causal")
                      for kind in ATTENTION for mask in MASKS}  # fmt: skip
        for (kind, mask), found in times(candidates, length, rounds).items():
            milliseconds[kind, mask, length] = found
    gains = {mask: [(n, milliseconds["plain", mask, n] / milliseconds["tiled", mask, n]) for n in lengths]
             for mask in MASKS}  # fmt: skip
    longest = lengths[-1]
    full, causal = (gains[mask][-1][1] for mask in MASKS)
    shares = {kind: milliseconds[kind, "causal", longest] / milliseconds[kind, "full", longest] for kind in ATTENTION}
    checks = [
        Check(f"causal, {longest:,} tokens: tiled attention is at least 2 times as fast",
              f"{causal:.1f}x", causal >= 2),
        Check(f"full, {longest:,} tokens: it is faster too, at least 1.2 times", f"{full:.1f}x", full >= 1.2),
        Check("the gain grows with the length: causal, it is larger for the longest than for the shortest",
              f"{gains['causal'][0][1]:.1f}x -> {causal:.1f}x", causal > gains["causal"][0][1]),
        Check("not only traffic: tiled, a causal mask takes at most 0.7 of the time of a full one",
              f"{shares['tiled']:.2f}", shares["tiled"] <= 0.7),
        Check("plain, it takes at least 0.9 of it", f"{shares['plain']:.2f}", shares["plain"] >= 0.9),
    ]  # fmt: skip
    table = [
        {"tokens": n} | {f"{kind}, {mask}, ms": milliseconds[kind, mask, n] for mask in MASKS for kind in ATTENTION}
        for n in lengths
    ]
    curves = {f"{kind}, {mask}": [(n, milliseconds[kind, mask, n]) for n in lengths]
              for kind in ATTENTION for mask in MASKS}  # fmt: skip
    plots = [
        Plot("tokens", "ms, forward and backward", curves, f"{HEADS} heads of {DIM}", "xy"),
        Plot("tokens", "time of plain attention / tiled", gains, "gain of tiles", "x"),
    ]
    return Findings(table, checks, plots, f"On {'a GPU, bf16' if torch.cuda.is_available() else 'the CPU, float32'}.")


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT * DIM**-0.5
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    return scores.softmax(-1) @ v


def tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


ATTENTION: dict[str, Callable[..., Tensor]] = {"plain": plain, "tiled": tiled}


def times(candidates: TimedAttention, length: int, rounds: int) -> dict[tuple[str, str], float]:
    """The median milliseconds of a forward and backward of each, which alternate; the first round is a warm-up."""
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    inputs = [torch.randn(1, HEADS, length, DIM, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    spent: dict[tuple[str, str], list[float]] = {name: [] for name in candidates}
    for _ in range(rounds + 1):
        for name, attend in candidates.items():
            start = time.perf_counter()
            attend(*inputs).sum().backward()
            if gpu:
                torch.cuda.synchronize()
            spent[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in spent.items()}
