"""LoRA against full fine-tuning, as the labs of this package measured it: losses over learning rates, and the claims of
"LoRA without regret" (Schulman et al. 2025), each with the predictions that hold here.

The bits that reinforcement learning provides are computed by the planner, for published models.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, Switch
from regard.instruments.measurements import Spread, measured, spread_of
from regard.instruments.panels import bars, lines, numbers, table
from regard.planning.groups import format_number
from regard.planning.published import PUBLISHED
from regard.planning.training import BITS_PER_PARAMETER, episode_bits, lora_parameters

RATES = "lora-rates"
CLAIMS = {  # what a claim is about: the lab that tests it, and which of its plots is shown
    "learning rate": (RATES, 2),
    "which layers": ("lora-layers", 0),
    "capacity": ("lora-capacity", 1),
    "batch size": ("lora-batch", 1),
    "reinforcement learning": ("rank-one-rl", 0),
}
LABS = tuple(lab for lab, _ in CLAIMS.values())
RANKS = (1, 4, 32, 128)
LENGTHS = ("long runs", "short runs")
FULL = "FullFT"
NEAR = 0.12  # of the range of losses, which is drawn above the minima
MODELS = ("gpt2", "llama-7b", "mistral-7b", "llama-3.1-8b")


def result_of(lab: str) -> dict[str, Any]:
    found = measured(lab)
    if found is None:
        raise ValueError(f"measured/{lab}.json is missing; run regard lab {lab}, then python docs/generate_labs.py")
    return found


def series_of(plot: dict[str, Any]) -> dict[str, list[tuple[float, ...]]]:
    """Points (x, y, low, high); rounding can put a mean just outside of its range."""
    return {
        name: [(x, y, min([y, *spread]), max([y, *spread])) for x, y, *spread in points]
        for name, points in plot["lines"].items()
    }


def best_rates(steps: int) -> dict[str, dict[str, Spread]]:
    """By method: the best rate after this many steps, as a multiple of FullFT's, and the lowest loss."""
    names = ("best rate", "times FullFT's", "lowest loss")
    rows = [row for row in result_of(RATES)["table"] if row["steps"] == steps]
    return {row["method"]: {name: spread_of(row[name]) for name in names} for row in rows}


def top_of(curves: dict[str, list[tuple[float, ...]]]) -> float:
    """Just above the worst of the curves' minima, so that runs that diverged do not flatten them."""
    losses = [[y for _, y, *_ in points] for points in curves.values()]
    lowest, highest = min(map(min, losses)), max(map(max, losses))
    return max(map(min, losses)) + NEAR * (highest - lowest)


def rate_panels(rank: int, length: str, others: bool, near: bool) -> list[Panel]:
    result, method = result_of(RATES), f"LoRA r {rank}"
    steps = sorted({row["steps"] for row in result["table"]})[-1 if length == LENGTHS[0] else 0]
    plot = next(plot for plot in result["plots"] if plot["title"] == f"after {steps} steps")
    curves = {name: points for name, points in series_of(plot).items() if others or name in (FULL, method)}
    best = best_rates(steps)
    factor = best[method]["times FullFT's"]
    marks = {FULL: best[FULL]["best rate"].mean, f"r {rank}: ×{factor.mean:.1f}": best[method]["best rate"].mean}
    factors = [(f"rank {rank}", best[f"LoRA r {rank}"]["times FullFT's"].mean) for rank in RANKS]
    cut = "; higher losses are cut off" if near else ""
    title = f"loss after {steps} steps against the learning rate; vertical lines: best rates{cut}"
    top = top_of(curves) if near else None
    items: dict[str, float | str] = {
        f"best rate, {FULL}": best[FULL]["best rate"].show(2),
        f"best rate, LoRA of rank {rank}": best[method]["best rate"].show(2),
        "times FullFT's": factor.show(2),
        "published": "about 10; 15 in short runs",
        f"lowest loss, {FULL}": best[FULL]["lowest loss"].show(),
        f"lowest loss, LoRA of rank {rank}": best[method]["lowest loss"].show(),
    }
    return [
        lines(title, curves, plot["x"], plot["y"], log_x=True, marks=marks, from_zero=False, top=top, wide=True),
        numbers(items, f"{length} of {steps} steps; mean [smallest, largest] of {len(result['seeds'])} seeds"),
        bars("best rate, as a multiple of FullFT's", factors, "×", "rank", RANKS.index(rank)),
    ]


def finding_panels(finding: str) -> list[Panel]:
    lab, shown = CLAIMS[finding]
    results = {name: measured(tested) for name, (tested, _) in CLAIMS.items()}
    shares = {name: 0.0 if found is None else share_that_holds(found["checks"]) for name, found in results.items()}
    missing = ", ".join(name for name, found in results.items() if found is None)
    title = "predictions that hold here with every seed" + (f"; not measured: {missing}" if missing else "")
    overview = bars(title, shares, "%", "finding", list(CLAIMS).index(finding))
    try:
        result = result_of(lab)
    except ValueError as error:
        return [overview, numbers({"results": str(error)}, f"{finding}: the lab {lab} was not measured")]
    plot = result["plots"][shown]
    rows = [
        (check["expected"], check["seeds"], check["observed"], "yes" if check["holds"] else "no")
        for check in result["checks"]
    ]
    return [
        overview,
        lines(
            f"{finding}: {plot['title'] or plot['y']}", series_of(plot), plot["x"], plot["y"],
            log_x="x" in plot["log"], log_y="y" in plot["log"], from_zero=False,
        ),
        table(f"{result['claim']} In the lab {lab}, {result['verdict']}.",
              ("prediction", "seeds", "observed", "holds"), rows),
    ]  # fmt: skip


def share_that_holds(checks: Sequence[dict[str, Any]]) -> float:
    """In percent."""
    return 100 * sum(check["holds"] for check in checks) / len(checks)


@cache
def rank_one(model: str) -> tuple[int, int]:
    """The weights of an adapter of rank 1: of all linear layers in the blocks, and of the output head."""
    spec = PUBLISHED[model].spec()
    return lora_parameters(spec, 1), lora_parameters(spec, 1, ("head",))


def bit_panels(model: str, adapter_rank: int, problems: int, samples: int, bits: float) -> list[Panel]:
    provided, weights = episode_bits(problems, samples, bits), adapter_rank * rank_one(model)[0]
    items: dict[str, float | str] = {
        "bits that the rewards provide, at most": f"{provided:,.0f}",
        f"weights of rank {adapter_rank}, {model}": f"{weights:,}",
        "weights per bit": weights / provided,
        "with the output head": f"{weights + adapter_rank * rank_one(model)[1]:,}",
        "capacity, 2 bits per weight": format_number(BITS_PER_PARAMETER * weights, "bit"),
    }
    values = {"bits of the rewards": provided, f"weights of rank {adapter_rank}": weights}
    return [bars("what the rewards can tell, and what the adapter can keep", values), numbers(items)]


def compare(
    finding: str, rank: str, length: str, others: bool, near: bool, model: str, adapter_rank: int, problems: int,
    samples: int, bits: float,
) -> list[Panel]:  # fmt: skip
    return [
        *rate_panels(int(rank.removeprefix("rank ")), length, others, near),
        *finding_panels(finding),
        *bit_panels(model, adapter_rank, problems, samples, bits),
    ]


INSTRUMENTS = (
    Instrument(
        "lora-rates", "LoRA and full fine-tuning",
        "LoRA trains an adapter, FullFT all weights of the same model, at many learning rates. Labs of this package "
        "test what the article LoRA without regret claims.",
        r"\eta_{\mathrm{LoRA}} \approx 10\,\eta_{\mathrm{full}} \text{ (published)}, \qquad "
        r"\text{bits} \le \text{problems} \cdot \text{samples} \cdot b",
        (
            Selection("finding", "finding", tuple(CLAIMS), "learning rate"),
            Selection("rank", "rank of LoRA", tuple(f"rank {rank}" for rank in RANKS), "rank 32"),
            Selection("length", "length of the runs", LENGTHS, LENGTHS[0]),
            Switch("others", "curves of all ranks", False),
            Switch("near", "only losses near the best", True),
            Selection("model", "model, for the bits", MODELS, "llama-3.1-8b"),
            Slider("adapter_rank", "rank of its adapter", 1, 64, 1),
            Slider("problems", "problems", 100, 100_000, 10_000, 100),
            Slider("samples", "samples per problem", 1, 256, 32),
            Slider("bits", "bits per sample", 0.5, 8.0, 1.0, 0.5),
        ),
        Quiz(
            "10,000 problems with 32 samples each: has rank 1 on Llama 3.1 8B room for all that the rewards tell?",
            "Yes. At one bit per sample they provide at most 320,000 bits; the adapter has 2.62 million weights, "
            "8 per bit. Supervised examples tell far more, so for them the rank can be too low: see capacity.",
            {"finding": "capacity", "model": "llama-3.1-8b", "adapter_rank": 1, "problems": 10_000, "samples": 32,
             "bits": 1.0},
        ),
        compare, ("labs/lora_rates.py", "labs/rank_one_rl.py", "planning/training.py"),
    ),
)  # fmt: skip
