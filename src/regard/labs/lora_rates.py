"""LoRA's best learning rate is about ten times full fine-tuning's, more in short runs, and hardly depends on the rank.

A decoder that knows a language of random rules is tuned on one in which a quarter of them differ (labs/fine_tuning.py),
with all weights (FullFT) and with LoRA of ranks 1 to 128 on all linear layers, α = 32, at rates a factor of 2 apart.
Measured: the loss on held-out sequences after 40 and after 200 steps, against the rate. The best rate is the minimum of
a parabola in log(rate) through the lowest point and its two neighbours.

Schulman et al. 2025, "LoRA without regret".
"""

# ledger: lwr.lr10 lwr.lr.rank

import statistics
from collections.abc import Mapping, Sequence

from regard.adapt.lora import LoRA
from regard.labs.experiment import Bench, Check, Findings, Plot, Point
from regard.labs.fine_tuning import Tuned, pretrain, tune
from regard.labs.fit import generator

RANKS, NEW_RULES = (1, 4, 32, 128), 256
FULL = "FullFT"
RATES = tuple(1e-4 * 2**k for k in range(9))
SHORT, FIRST_STEPS = 40, 10
EARLY_RATE = RATES[4]  # one rate for all ranks, to compare their first steps


def run(bench: Bench) -> Findings:
    losses = measure(bench)
    lengths = {"short": bench.training(SHORT, 1), "long": bench.training(200, 2)}
    u_curves = {
        name: {method: [(rate, run.loss_after(steps)) for rate, run in runs.items()] for method, runs in losses.items()}
        for name, steps in lengths.items()
    }
    best = {name: {method: minimum(points) for method, points in curves.items()} for name, curves in u_curves.items()}
    table = [
        {"method": method, "steps": lengths[name], "best rate": rate, "times FullFT's": rate / rates[FULL]}
        | {"lowest loss": min(loss for _, loss in u_curves[name][method])}
        for name, rates in best.items()
        for method, rate in rates.items()
    ]
    early = {
        method: [point for point in runs[EARLY_RATE].curve if point[0] <= lengths["short"]]
        for method, runs in losses.items()
        if method != FULL
    }
    plots = [
        *(
            Plot("learning rate", "loss", curves, f"after {lengths[name]} steps", "x")
            for name, curves in u_curves.items()
        ),
        Plot("step", "loss", early, f"at a rate of {EARLY_RATE:g}"),
    ]
    remark = (
        "Losses in nats per symbol, means over the last 15 % of the steps. A loss above that of the base model, or "
        "of a run that diverged, counts as that of the base model."
    )
    return Findings(table, checks(best, u_curves["long"], early, bench.training(FIRST_STEPS, 1)), plots, remark)


def measure(bench: Bench) -> dict[str, dict[float, Tuned]]:
    """The run of every method and rate."""
    language, base = pretrain(bench)
    changed = language.change(NEW_RULES, generator(bench.seed + 1))
    steps = bench.training(200, 2)
    methods: dict[str, LoRA | None] = {FULL: None} | {f"LoRA r {rank}": LoRA(rank=rank) for rank in RANKS}
    found: dict[str, dict[float, Tuned]] = {method: {} for method in methods}
    for method, lora in bench.each("methods", methods.items()):
        rates = RATES[2:] if lora else RATES[:7]
        for rate in bench.setting(rates, rates[2:4]):
            found[method][rate] = tune(base, changed, lora, rate, steps, bench.seed)
            bench.show(f"{method}, rate {rate:.2g}: loss {found[method][rate].loss_after():.3f}")
    return found


def checks(
    best: Mapping[str, Mapping[str, float]],
    u_curves: Mapping[str, Sequence[Point]],
    early: Mapping[str, Sequence[Point]],
    first: int,
) -> list[Check]:
    ranks = [f"LoRA r {rank}" for rank in RANKS[1:]]
    ratio = {
        name: statistics.geometric_mean([rates[method] / rates[FULL] for method in ranks])
        for name, rates in best.items()
    }
    spread = {
        name: max(rates[method] for method in ranks) / min(rates[method] for method in ranks)
        for name, rates in best.items()
    }
    lowest = {method: min(loss for _, loss in points) for method, points in u_curves.items()}
    steps_losses = [dict(points)[first] for points in early.values()]
    apart = max(steps_losses) / min(steps_losses) - 1
    return [
        Check("long runs: the best rate of ranks 4 to 128 is 5 to 20 times FullFT's", f"{ratio['long']:.1f}x",
              5 <= ratio["long"] <= 20),
        Check("short runs: it is 7.5 to 30 times FullFT's", f"{ratio['short']:.1f}x", 7.5 <= ratio["short"] <= 30),
        Check("the factor is larger in short runs than in long ones", f"{ratio['short']:.1f}x and {ratio['long']:.1f}x",
              ratio["short"] > ratio["long"]),
        *(Check(f"{name} runs: the best rates of ranks 4 to 128 differ by less than a factor of 2",
                f"{spread[name]:.2f}x", spread[name] < 2) for name in best),
        Check("long runs: rank 1 has a lower best rate than rank 32",
              f"{best['long']['LoRA r 1']:.2g} and {best['long']['LoRA r 32']:.2g}",
              best["long"]["LoRA r 1"] < best["long"]["LoRA r 32"]),
        Check(f"after {first} steps at the same rate the losses of all ranks differ by less than 5 %",
              f"{100 * apart:.1f} %", apart < 0.05),
        Check("long runs: the lowest loss of rank 128 is FullFT's, within 2 %",
              f"{lowest['LoRA r 128']:.4f} and {lowest[FULL]:.4f}", lowest["LoRA r 128"] < 1.02 * lowest[FULL]),
    ]  # fmt: skip


def minimum(points: Sequence[Point]) -> float:
    """The rate with the lowest loss, by a parabola in log(rate); at the end of the range the rate itself."""
    lowest = min(range(len(points)), key=lambda i: points[i][1])
    if lowest in (0, len(points) - 1):
        return points[lowest][0]
    (rate, _), (left, middle, right) = points[lowest], (loss for _, loss in points[lowest - 1 : lowest + 2])
    shift = (left - right) / (2 * (left - 2 * middle + right)) if left + right > 2 * middle else 0.0
    return rate * (points[lowest + 1][0] / rate) ** shift
