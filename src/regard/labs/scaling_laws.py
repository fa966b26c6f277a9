"""The loss falls like powers of size and data; at fixed compute the best size and data grow together.

Decoders of five widths learn the Python manual character by character, each with 50,000 to 400,000 characters and with
a learning-rate schedule of its own length. The rate falls with the square root of the width; the law and the IsoFLOP
curves are those of `regard scale`. Three widths are also trained on a small part of the text, repeated until the number
of tokens is that of the longest runs.

Kaplan et al. 2020; Hoffmann et al. 2022; Muennighoff et al. 2023 on repeated data. N are the parameters without
embedding and output layer, C the counted FLOPs.
"""

# ledger: scale.power scale.chinchilla scale.both

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.sources.files import Pydoc
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.small_models import MIXERS, decoder_spec
from regard.labs.tasks import whole_rows
from regard.objectives.next_token import next_token
from regard.planning import plan
from regard.planning.isoflop import IsoFlops, isoflops
from regard.planning.parameters import non_embedding_parameters
from regard.planning.scaling import ScalingRun
from regard.planning.scaling_fit import ScalingFit, fit_law

WIDTHS, LAYERS = (16, 24, 32, 48, 64), 2
TOKENS = (50_000, 100_000, 200_000, 400_000)
REPEATED_WIDTHS, PART = WIDTHS[::2], 20_000  # characters that are repeated
ROWS, LENGTH = 16, 64
RATE, RATE_WIDTH = 1e-2, 32  # of AdamW; the rate of a width is RATE · √(RATE_WIDTH / width)
HELD_OUT_ROWS, DRAWS = 512, 100


def run(bench: Bench) -> Findings:
    text, held_out, vocab = manual(bench.seed)
    held_out = held_out[: bench.setting(HELD_OUT_ROWS, 4)]
    counts = tuple(bench.training(count, count // 2500) for count in TOKENS)
    runs = [train(bench, width, count, vocab, text, held_out) for width in WIDTHS for count in counts]
    part = text[: max(2 * LENGTH, counts[-1] * PART // TOKENS[-1])]
    repeated = [train(bench, width, counts[-1], vocab, part, held_out) for width in REPEATED_WIDTHS]
    return conclude(runs, repeated)


def manual(seed: int) -> tuple[Tensor, Tensor, int]:
    """The training text as ids in an order by the seed, rows of held-out ids (R, LENGTH + 1), and the vocabulary."""
    train_split, held_split = Pydoc().open(0)
    assert train_split.count is not None and held_split is not None and held_split.count is not None
    order = torch.randperm(train_split.count, generator=generator(seed)).tolist()
    text = "\n".join(train_split.example(i)["text"] for i in order)
    other = "\n".join(held_split.example(i)["text"] for i in range(held_split.count))
    characters = sorted({*text, *other})
    number = {character: i for i, character in enumerate(characters)}
    ids, held = (torch.tensor([number[character] for character in part]) for part in (text, other))
    rows = held[: len(held) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    chosen = torch.linspace(0, len(rows) - 1, min(HELD_OUT_ROWS, len(rows))).long()
    return ids, rows[chosen], len(characters)


def batch_of(rows: Tensor) -> Batch:
    """Of rows (B, LENGTH + 1)."""
    return whole_rows(rows[:, :-1], rows[:, 1:], torch.ones_like(rows[:, 1:]))


def train(bench: Bench, width: int, tokens: int, vocab: int, text: Tensor, held_out: Tensor) -> ScalingRun:
    """Train on random slices of the text."""
    torch.manual_seed(bench.seed)
    spec = decoder_spec(MIXERS["attention"], vocab, width, LAYERS)
    model, steps = spec.build(), max(2, round(tokens / (ROWS * LENGTH)))

    def slices(rng: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=rng)
        return batch_of(text[starts + torch.arange(LENGTH + 1)])

    label = f"width {width}, {tokens:,} tokens" + (" of repeated text" if len(text) < tokens // 2 else "")
    fit(bench, label, model, slices, steps, RATE * math.sqrt(RATE_WIDTH / width))
    total = 0.0
    with torch.no_grad():
        for rows in held_out.split(64):
            loss, count, _ = next_token(model, batch_of(rows))
            total += float(loss) / float(count) * len(rows)
    planned, seen = plan(spec, context=LENGTH, batch=ROWS), steps * ROWS * LENGTH
    size = non_embedding_parameters(planned.count)
    return ScalingRun(size, seen, total / len(held_out), planned.training_flops * seen)


def conclude(runs: Sequence[ScalingRun], repeated: Sequence[ScalingRun]) -> Findings:
    sizes = sorted({run.parameters for run in runs})
    losses = {(run.parameters, run.tokens): run.loss for run in runs}
    counts = sorted({run.tokens for run in runs})
    largest = [run for run in runs if run.parameters == sizes[-1]]
    law, smaller = try_fit(runs, DRAWS), try_fit([run for run in runs if run not in largest], 0)
    iso = isoflops(runs, law, DRAWS)
    checks = [
        *power_checks(law, smaller, largest, iso),
        *optimum_checks(law, iso),
        *data_checks(sizes, counts, losses, {run.parameters: run.loss for run in repeated}),
    ]
    table = [
        {"N": int(size), "D": int(count), "loss": losses[size, count]} for size in sizes for count in counts
    ] + [{"N": int(run.parameters), "D": int(run.tokens), "loss": run.loss} for run in repeated]  # fmt: skip
    by_size = {f"N = {size:,.0f}": [(count, losses[size, count]) for count in counts] for size in sizes}
    fresh = [(size, losses[size, counts[-1]]) for size in sizes]
    by_data = {
        f"{counts[0]:,.0f} tokens": [(size, losses[size, counts[0]]) for size in sizes],
        f"{counts[-1]:,.0f} tokens": fresh,
        "the same, few of them repeated": [(run.parameters, run.loss) for run in repeated],
    }
    plots = [
        Plot("training tokens D", "held-out loss", by_size, "a line per size", "xy"),
        Plot("parameters N", "held-out loss", by_data, "little data, more, and repeated", "x"),
    ]
    remark = (
        "Sizes and lengths are far below those of the papers, and the rates of the sizes follow a rule and were not "
        "searched, so the exponents are those of these models only. The text "
        "has 410,000 characters, so the longest runs read it about once; the last rows of the table are those on "
        f"{PART:,} repeated characters (at full size)."
    )
    return Findings(table, checks, plots, remark)


def try_fit(runs: Sequence[ScalingRun], draws: int) -> ScalingFit | None:
    """None where the losses follow no law, as after the few steps of a quick run."""
    try:
        return fit_law(runs, draws)
    except ValueError:
        return None


def power_checks(
    law: ScalingFit | None, smaller: ScalingFit | None, largest: Sequence[ScalingRun], iso: IsoFlops
) -> list[Check]:
    errors = [abs(smaller.law.loss(run.parameters, run.tokens) / run.loss - 1) for run in largest] if smaller else []
    exponents, positive = "no fit", False
    if law is not None:
        alpha = law.interval(lambda fitted: fitted.size_exponent)
        beta = law.interval(lambda fitted: fitted.data_exponent)
        positive = alpha is not None and beta is not None and min(alpha[0], beta[0]) > 0
        exponents = ", ".join(
            f"{name} {exponent:.2f} " + (f"[{spread[0]:.2f}, {spread[1]:.2f}]" if spread else "without an interval")
            for name, exponent, spread in (
                ("alpha", law.law.size_exponent, alpha),
                ("beta", law.law.data_exponent, beta),
            )
        )
    lowest = [(math.log(curve.compute), math.log(min(loss for _, loss in curve.points))) for curve in iso.curves]
    straight = correlation(lowest) if len(lowest) > 2 else 0.0
    return [
        Check("the law fits all losses of the grid within 1 % (root of the mean square)",
              f"{law.error:.2%}" if law else "no fit", law is not None and law.error < 0.01),
        Check("both exponents are above 0 with their 90 % intervals", exponents, positive),
        Check("the law of the four smaller sizes predicts the losses of the largest within 2 %",
              f"at most {max(errors):.1%}" if errors else "no fit", bool(errors) and max(errors) < 0.02),
        Check("the least loss of a compute is a falling straight line in logarithms (r below -0.98)",
              f"r = {straight:.3f}", straight < -0.98),
    ]  # fmt: skip


def optimum_checks(law: ScalingFit | None, iso: IsoFlops) -> list[Check]:
    vertices = sum(curve.size is not None for curve in iso.curves)
    measured, grow = f"{vertices} of {len(iso.curves)} curves have a minimum between the sizes", False
    if iso.size_exponent is not None and iso.token_exponent is not None:
        grow = iso.size_exponent > 0 and iso.token_exponent > 0
        measured = f"N ∝ C^{iso.size_exponent:.2f}, D ∝ C^{iso.token_exponent:.2f}"
    spread = law.interval(lambda found: found.optimum_exponent) if law else None
    fitted = f"{law.law.optimum_exponent:.2f} [{spread[0]:.2f}, {spread[1]:.2f}]" if law and spread else "no fit"
    return [
        Check("the best size and the best number of tokens both grow with compute (IsoFLOP curves)", measured, grow),
        Check("the exponent of the best size is between 0.3 and 0.7 by the law, so that neither stands still",
              fitted, law is not None and 0.3 < law.law.optimum_exponent < 0.7),
    ]  # fmt: skip


def data_checks(
    sizes: Sequence[float],
    counts: Sequence[float],
    losses: dict[tuple[float, float], float],
    repeated: dict[float, float],
) -> list[Check]:
    middle, top = sizes[len(sizes) // 2], sizes[-1]

    def gain(small: float, large: float) -> float:
        return 1 - large / small

    little, much = (gain(losses[middle, count], losses[top, count]) for count in (counts[0], counts[-1]))
    again = gain(repeated[middle], repeated[top])
    return [
        Check("four times the size gains less than half as much from the fewest tokens as from the most",
              f"{little:.1%} and {much:.1%}", little < much / 2),
        Check("on few repeated tokens four times the size gains nothing (below 1 %)", f"{again:.1%}", again < 0.01),
    ]  # fmt: skip


def correlation(points: Sequence[tuple[float, float]]) -> float:
    return torch.corrcoef(torch.tensor(points, dtype=torch.float64).T)[0, 1].item()
