"""Additive and scaled dot-product scores learn alike and the product is faster; unscaled it learns worse at large d_k.

The dot product of two vectors of d_k independent numbers has a standard deviation of √d_k, so the softmax of wide ones
saturates and its gradient is small; dividing by √d_k prevents it (Vaswani et al. 2017). "Additive and dot-product
attention perform alike, dot products are faster" is true only with the scale. One layer with one head learns
associative recall, with the score vᵀtanh(W_q s + W_k h) of d_k hidden units (Bahdanau et al. 2014) or with products of
d_k dimensions. Each is trained at three learning rates and judged by its best, because the scores need different rates.
Measured: the final loss and accuracy, and the time per step.
"""

# ledger: anc.score.compare

import statistics
from collections.abc import Callable

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import decoder_spec
from regard.labs.tasks import FIRST, associative_recall
from regard.parts.attention import Attention
from regard.parts.body import Body
from regard.parts.scored_attention import ScoredAttention

PAIRS, SYMBOLS, WIDTH = 4, 32, 64
LEARNING_RATES = (1e-3, 3e-3, 1e-2)


def run(bench: Bench) -> Findings:
    dims, steps = bench.setting((16, 128, 512), (4, 8)), bench.training(300, 2)
    table, loss, recall, time = [], {}, {}, {}
    for dim in dims:
        for name, mixer in scores(dim).items():
            runs = [train(bench, f"{name}, {dim}, rate {rate:g}", mixer, steps, rate) for rate in LEARNING_RATES]
            loss[name, dim], rate, recall[name, dim], _ = min(runs)
            time[name, dim] = 1000 * statistics.median(seconds for *_, seconds in runs)
            table.append(
                {"score": name, "d_k": dim, "best learning rate": rate, "final loss": loss[name, dim]}
                | {"accuracy": recall[name, dim], "ms per step": time[name, dim]}
            )
    narrow, wide = dims[0], dims[-1]

    def compare(expected: str, name: str, other: str, dim: int, holds: Callable[[float], bool]) -> Check:
        a, b = recall[name, dim], recall[other, dim]
        return Check(f"d_k = {dim}: {expected}", f"accuracy {a:.2f} ({name}), {b:.2f} ({other})", holds(a - b))

    equal = "scaled products and additive scores have the same accuracy, within 0.05"
    checks = [
        compare(equal, "scaled dot", "additive", narrow, lambda difference: abs(difference) < 0.05),
        compare(equal, "scaled dot", "additive", wide, lambda difference: abs(difference) < 0.05),
        compare("unscaled products are as accurate as scaled ones, within 0.05", "dot", "scaled dot", narrow,
                lambda difference: difference > -0.05),
        compare("unscaled products are less accurate than scaled ones, by 0.05 or more", "dot", "scaled dot", wide,
                lambda difference: difference < -0.05),
        Check(f"d_k = {wide}: products are faster than additive scores",
              f"{time['scaled dot', wide]:.0f} and {time['additive', wide]:.0f} ms per step",
              time["scaled dot", wide] < time["additive", wide]),
    ]  # fmt: skip

    def lines(values: dict[tuple[str, int], float]) -> dict[str, list[tuple[float, float]]]:
        return {name: [(dim, values[name, dim]) for dim in dims] for name in scores(narrow)}

    plots = [
        Plot("d_k", "final loss", lines(loss), f"after {steps} steps at the best rate", "xy"),
        Plot("d_k", "ms per step", lines(time), "time", "xy"),
    ]
    remark = f"Guessing among the {PAIRS} values of a sequence: {1 / PAIRS}. Best of {len(LEARNING_RATES)} rates."
    return Findings(table, checks, plots, remark)


def train(bench: Bench, label: str, mixer: Body, steps: int, rate: float) -> tuple[float, float, float, float]:
    """Final loss, learning rate, accuracy on new sequences, seconds per step."""
    torch.manual_seed(bench.seed)
    model = decoder_spec(mixer, FIRST + SYMBOLS, WIDTH, 1, convolution=True).build()
    history = fit(bench, label, model, make_batch, steps, rate)
    recall = accuracy(model, make_batch(generator(bench.seed + 1), bench.setting(256, 8)))
    return statistics.fmean(history["loss"][-20:]), rate, recall, statistics.median(history["seconds"])


def scores(dim: int) -> dict[str, Body]:
    return {
        "additive": ScoredAttention(score_dim=dim),
        "dot": Attention(1, head_dim=dim, scale=1.0),
        "scaled dot": Attention(1, head_dim=dim),
    }


def make_batch(rng: torch.Generator, rows: int = 32) -> Batch:
    return associative_recall(rng, PAIRS, rows, SYMBOLS)
