"""A few huge channels are what makes activations of few bits hard; a scale per channel, or smoothing, solves it.

SmolLM2 reads the Python manual. The weights of its linear layers are rounded to 8 bits, with a scale per output, and
their inputs to 8 or 6 bits: with one scale for all numbers, one per token, one per channel, or after smoothing
(SmoothQuant: a part of each channel's size, measured on another text, moves into the weights) with one for all or one
per token. Is it the few largest channels? With one scale for all, the largest 1 % of the channels of every layer, again
on another text, is left exact; as a control as many random ones. Measured: the loss above that with exact inputs.

Dettmers et al. 2022 (LLM.int8), Xiao et al. 2022 (SmoothQuant).
"""

# ledger: q.outliers

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator
from regard.labs.trained_model import read_manual
from regard.models.decoder import DecoderModule

BITS, KEPT = (8, 6), 0.01  # bits of inputs; share of the channels that are left exact
TENSOR, TOKEN, CHANNEL = "one for all", "per token", "per channel"
SMOOTHED, BOTH = "smoothed", "smoothed, per token"
LARGEST, RANDOM = "largest 1 % exact", "random 1 % exact"
WAYS = (TENSOR, RANDOM, LARGEST, TOKEN, SMOOTHED, BOTH, CHANNEL)
LABELS = ("one for\nall", "random\n1 %\nexact", "largest\n1 %\nexact", "per\ntoken", "smooth", "smooth,\nper\ntoken",
          "per\nchannel")  # fmt: skip
SMOOTH: dict[str, int | tuple[int, ...]] = {SMOOTHED: (0, 1, 2), BOTH: -1}  # dimensions that a scale covers
Sizes = dict[nn.Linear, Tensor]  # by layer: the largest |x| of each input channel (D,)


@torch.no_grad()
def run(bench: Bench) -> Findings:
    length = bench.setting(256, 16)
    model, ids = read_manual(bench, 2, length + 1)
    layers = [layer for layer in model.stack.modules() if isinstance(layer, nn.Linear)]
    sizes = channel_sizes(model, layers, ids[1:, :-1])
    peaks = [float(size.max() / size.median()) for size in sizes.values()]
    exact = {layer: layer.weight.data for layer in layers}
    losses, base = {}, {}
    for way in bench.each("ways", WAYS):
        for layer in layers:
            scale = smoothing(sizes[layer], exact[layer]) if way in SMOOTH else torch.ones_like(sizes[layer])
            layer.weight.data = nearest(exact[layer] * scale, 8, -1) / scale
        base[way] = loss_of(model, ids[:1])
        for bits in BITS:
            with rounded_inputs(layers, rounding(way, bits, sizes, exact, bench.seed)):
                losses[way, bits] = loss_of(model, ids[:1])
        bench.show(f"{way}: {losses[way, BITS[-1]]:.3f}")
    rise = {key: loss - base[TENSOR] for key, loss in losses.items()}
    few, worst = BITS[-1], rise[TENSOR, BITS[-1]]
    left = {way: rise[way, few] / worst for way in WAYS}
    huge = sum(peak > 10 for peak in peaks) / len(peaks)
    checks = [
        Check("in at least half of the layers the largest channel is more than ten times the median one",
              f"{100 * huge:.0f} % of the layers, up to {max(peaks):,.0f} times", huge >= 0.5),
        Check("one scale for all: the loss rises by more than 0.1 with 8 bits, and further with 6",
              ", ".join(f"{rise[TENSOR, bits]:.2f}" for bits in BITS), 0.1 < rise[TENSOR, 8] < worst),
        Check("the largest channels are the main problem: with 1 % of them exact, less than half of the rise is left",
              f"{100 * left[LARGEST]:.0f} %", left[LARGEST] < 0.5),
        Check("with random ones exact instead, more than three quarters are left", f"{100 * left[RANDOM]:.0f} %",
              left[RANDOM] > 0.75),
        Check("one scale per channel: less than a tenth is left", f"{100 * left[CHANNEL]:.0f} %", left[CHANNEL] < 0.1),
        Check("smoothing: less than a quarter is left", f"{100 * left[SMOOTHED]:.0f} %", left[SMOOTHED] < 0.25),
        Check("smoothing and a scale per token: less than a tenth is left", f"{100 * left[BOTH]:.0f} %",
              left[BOTH] < 0.1),
        Check("with 8 bits, scales per channel, or smoothing, cost less than 0.02 nats",
              f"{rise[CHANNEL, 8]:.3f} and {rise[SMOOTHED, 8]:.3f}", max(rise[CHANNEL, 8], rise[SMOOTHED, 8]) < 0.02),
    ]  # fmt: skip
    table = [
        {"scales of inputs": way, "exact inputs": base[way]} | {f"{bits} bits": losses[way, bits] for bits in BITS}
        for way in WAYS
    ]
    plots = [
        Plot("layer", "largest channel / median channel", {"inputs": list(enumerate(peaks))}, "linear layers", "y"),
        Plot("", "nats above exact inputs", {
            f"{bits} bits": [(i, rise[way, bits]) for i, way in enumerate(WAYS)] for bits in BITS
        }, groups=LABELS),
    ]  # fmt: skip
    remark = "Per token, a scale covers the largest channel of the token. Seeds draw other text; the model is the same."
    return Findings(table, checks, plots, remark)


def nearest(x: Tensor, bits: int, dims: int | tuple[int, ...]) -> Tensor:
    """x with symmetric integers of `bits` bits; a scale covers the dimensions `dims`."""
    scale = (x.abs().amax(dims, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / scale).round() * scale


def smoothing(size: Tensor, weight: Tensor) -> Tensor:
    """√(max |x| / max |W|) per input channel"""
    return (size.clamp_min(1e-4) / weight.abs().amax(0).clamp_min(1e-4)).sqrt()


def rounding(
    way: str, bits: int, sizes: Sizes, exact: dict[nn.Linear, Tensor], seed: int
) -> Callable[[nn.Linear, Tensor], Tensor]:
    """The function that rounds the inputs (B, L, D) of a layer."""

    def rounded(layer: nn.Linear, x: Tensor) -> Tensor:
        size, count = sizes[layer], max(1, round(KEPT * len(sizes[layer])))
        if way == CHANNEL:
            return nearest(x, bits, (0, 1))
        if way in SMOOTH:
            scale = smoothing(size, exact[layer])
            return nearest(x / scale, bits, SMOOTH[way]) * scale
        if way == TOKEN:
            return nearest(x, bits, -1)
        kept = torch.zeros_like(size, dtype=torch.bool)
        if way != TENSOR:
            order = torch.randperm(len(size), generator=generator(seed)) if way == RANDOM else size.argsort().flip(0)
            kept[order[:count]] = True
        return torch.where(kept, x, nearest(x.masked_fill(kept, 0), bits, (0, 1, 2)))

    return rounded


@contextmanager
def rounded_inputs(layers: list[nn.Linear], change: Callable[[nn.Linear, Tensor], Tensor]) -> Generator[None]:
    handles = [layer.register_forward_pre_hook(lambda layer, args: (change(layer, args[0]),)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def channel_sizes(model: DecoderModule, layers: list[nn.Linear], ids: Tensor) -> Sizes:
    sizes: Sizes = {}

    def record(layer: nn.Linear, x: Tensor) -> Tensor:
        sizes[layer] = x.abs().amax((0, 1))
        return x

    with rounded_inputs(layers, record):
        model(ids)
    return sizes


def loss_of(model: DecoderModule, ids: Tensor) -> float:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()
