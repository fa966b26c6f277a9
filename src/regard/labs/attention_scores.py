"""Additive and scaled dot-product scores learn alike and the product is faster; unscaled it falls behind when wide.

A dot product of two vectors of d_k independent numbers deviates by √d_k, so that the softmax of wide ones saturates and
hardly passes gradients on; dividing by √d_k repairs it (Vaswani et al. 2017). The saying "additive and dot product do
alike, dot wins on speed" is only true with the scale. One layer with one head learns associative recall, by the score
vᵀtanh(W_q s + W_k h) of d_k hidden units (Bahdanau et al. 2014) or by products of d_k. Each is trained at three rates
and judged by its best, for a rate that suits one score need not suit another. Measured: loss and accuracy at the end,
and the time of a step.
"""

# ledger: anc.score.compare

import statistics
from collections.abc import Callable

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.contenders import spec
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.tasks import FIRST, associative_recall
from regard.parts.attention import Attention
from regard.parts.body import Body
from regard.parts.scored_attention import ScoredAttention

PAIRS, SYMBOLS, WIDTH = 4, 32, 64
RATES = (1e-3, 3e-3, 1e-2)


def run(bench: Bench) -> Findings:
    dims, steps = bench.pick((16, 128, 512), (4, 8)), bench.pick(300, 2)
    table, loss, right, time = [], {}, {}, {}
    for dim in dims:
        for name, mixer in scores(dim).items():
            tried = [trained(bench, f"{name}, {dim}, rate {rate:g}", mixer, steps, rate) for rate in RATES]
            loss[name, dim], rate, right[name, dim], _ = min(tried)
            time[name, dim] = 1000 * statistics.median(seconds for *_, seconds in tried)
            table.append(
                {"score": name, "d_k": dim, "best rate": rate, "loss at the end": loss[name, dim]}
                | {"accuracy": right[name, dim], "ms a step": time[name, dim]}
            )
    narrow, wide = dims[0], dims[-1]

    def compared(what: str, name: str, other: str, dim: int, holds: Callable[[float], bool]) -> Check:
        one, two = right[name, dim], right[other, dim]
        return Check(f"d_k = {dim}: {what}", f"{name} {one:.2f}, {other} {two:.2f} right", holds(one - two))

    alike, keeps_up = "scaled products and additive scores learn alike, within 0.05", "unscaled products keep up"
    checks = [
        compared(alike, "scaled dot", "additive", narrow, lambda ahead: abs(ahead) < 0.05),
        compared(alike, "scaled dot", "additive", wide, lambda ahead: abs(ahead) < 0.05),
        compared(keeps_up, "dot", "scaled dot", narrow, lambda ahead: ahead > -0.05),
        compared("unscaled products fall behind", "dot", "scaled dot", wide, lambda ahead: ahead < -0.05),
        Check(f"d_k = {wide}: products are faster than additive scores",
              f"{time['scaled dot', wide]:.0f} against {time['additive', wide]:.0f} ms a step",
              time["scaled dot", wide] < time["additive", wide]),
    ]  # fmt: skip

    def lines(found: dict[tuple[str, int], float]) -> dict[str, list[tuple[float, float]]]:
        return {name: [(dim, found[name, dim]) for dim in dims] for name in scores(narrow)}

    plots = [
        Plot("d_k", "loss at the end", lines(loss), f"after {steps} steps at the best rate", "xy"),
        Plot("d_k", "ms a step", lines(time), "time", "xy"),
    ]
    remark = f"Guessing among the {PAIRS} values that were told: {1 / PAIRS}. Best of {len(RATES)} rates."
    return Findings(table, checks, plots, remark)


def trained(bench: Bench, what: str, mixer: Body, steps: int, rate: float) -> tuple[float, float, float, float]:
    """Loss at the end, the rate, accuracy on other texts, seconds a step."""
    torch.manual_seed(bench.seed)
    model = spec(mixer, FIRST + SYMBOLS, WIDTH, 1, neighbours=True).build()
    seen = fit(bench, what, model, recall, steps, rate)
    right = accuracy(model, recall(generator(bench.seed + 1), bench.pick(256, 8)))
    return statistics.fmean(seen["loss"][-20:]), rate, right, statistics.median(seen["seconds"])


def scores(dim: int) -> dict[str, Body]:
    return {
        "additive": ScoredAttention(score_dim=dim),
        "dot": Attention(1, head_dim=dim, scale=1.0),
        "scaled dot": Attention(1, head_dim=dim),
    }


def recall(draws: torch.Generator, rows: int = 32) -> Batch:
    return associative_recall(draws, PAIRS, rows, SYMBOLS)
