"""Attention can collapse in two ways: rows become one-hot and no longer adapt, or all tokens become alike with depth.

Rank: random stacks of attention, with and without residual connections and feed-forward layers, read random tokens.
After each layer the distance of the tokens from their mean is measured, relative to their size, and the cosine of two
tokens. Rows: the scores of a layer of random attention are multiplied by a growing factor. The entropy of its rows and
the change of its weights after a small change of its input are measured.
"""

# ledger: lens.collapse

import math

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator
from regard.layout import TokenLayout
from regard.lens import entropy, rank_collapse, record
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention, AttentionModule
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import NoNorm

WIDTH, VOCAB, LENGTH = 64, 200, 32
FACTORS = (1, 4, 16, 64, 256)
BLOCKS = {
    "attention only": Block((Sublayer(Attention(4), NoNorm()),), keep=0.0),
    "attention and residual": Block((Sublayer(Attention(4)),)),
    "attention, residual, feed-forward": Block((Sublayer(Attention(4)), Sublayer(FeedForward(4 * WIDTH)))),
}


@torch.no_grad()
def run(bench: Bench) -> Findings:
    depth = bench.setting(12, 3)
    ids = torch.randint(VOCAB, (4, LENGTH), generator=generator(bench.seed))
    distances, cosines = {}, {}
    for name, block in BLOCKS.items():
        model = Decoder(VOCAB, WIDTH, (Repeat((block,), depth),)).build(seed=bench.seed).eval()
        found = rank_collapse(model, ids)
        distances[name] = list(enumerate(found.residual.values()))
        cosines[name] = list(enumerate(found.cosine.values()))
    rows = {factor: measure_rows(bench.seed, factor) for factor in FACTORS}
    entropies, changes = ([(factor, rows[factor][i]) for factor in FACTORS] for i in (0, 1))
    largest = mean_log(LENGTH)
    plain, residual, whole = (points[-1][1] for points in distances.values())
    peak = max(change for _, change in changes)
    checks = [
        Check(f"attention only: after {depth} layers the distance from the mean is below 0.01 of the size",
              f"{plain:.2g}", plain < 0.01),
        Check("with residual connections it is above 0.5", f"{residual:.2f}", residual > 0.5),
        Check("with feed-forward layers too, it is above 0.5", f"{whole:.2f}", whole > 0.5),
        Check("scores times 1: the entropy of rows is above 0.8 of that of uniform rows",
              f"{entropies[0][1]:.2f} of {largest:.2f}", entropies[0][1] > 0.8 * largest),
        Check(f"scores times {FACTORS[-1]}: it is below 0.05 of that", f"{entropies[-1][1]:.3f}",
              entropies[-1][1] < 0.05 * largest),
        Check(f"scores times {FACTORS[-1]}: a small change of the input changes the weights less than at the factor "
              "where it changes them most, by half or more", f"{changes[-1][1]:.3f}, at most {peak:.3f}",
              changes[-1][1] < peak / 2),
    ]  # fmt: skip
    table = [
        {"layer": layer, "model": name, "distance from the mean": y, "cosine": cosines[name][layer][1]}
        for name, points in distances.items() for layer, y in points
    ]  # fmt: skip
    plots = [
        Plot("layer", "distance of tokens from their mean", distances, "rank", "y"),
        Plot("layer", "cosine of two tokens", cosines, "rank"),
        Plot(
            "factor of the scores", "nats, or share", {"entropy": entropies, "change of weights": changes}, "rows", "x"
        ),
    ]
    remark = (
        "Random weights: in training, residual branches can grow and change this. A one-hot row has no gradient, but "
        "its single key still changes with the input, in jumps."
    )
    return Findings(table, checks, plots, remark)


def measure_rows(seed: int, factor: float) -> tuple[float, float]:
    """The mean entropy of the rows, and the mean change of a row (total variation) if the input changes by 3 %."""
    torch.manual_seed(seed)
    module, layout = AttentionModule(WIDTH, Attention(4)).eval(), TokenLayout.whole(4, LENGTH)
    x = torch.randn(4, LENGTH, WIDTH, generator=generator(seed))
    near = x + 0.03 * torch.randn(x.shape, generator=generator(seed + 1))
    weights, others = (weights_of(module, y, layout, factor) for y in (x, near))
    return float(entropy(weights).mean()), float((weights - others).abs().sum(-1).mean() / 2)


def weights_of(module: AttentionModule, x: Tensor, layout: TokenLayout, factor: float) -> Tensor:
    """(B, H, L, L) weights of scores multiplied by the factor."""
    scale = module.scale
    module.scale = scale * factor
    with record(module, "pattern") as recorded:
        module(x, layout)
    module.scale = scale
    return recorded["pattern"]


def mean_log(length: int) -> float:
    """The mean entropy of uniform causal rows."""
    return sum(math.log(n) for n in range(1, length + 1)) / length
