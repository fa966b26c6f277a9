"""Errors grow as weights get fewer bits, and hard tasks suffer first; training with rounded weights keeps more.

A decoder learns three tables of random facts, z = T(x, y), of 32, 256 and 1,024 entries. They are alike in all but the
number of facts, which makes the largest the hardest task. Then its linear layers are rounded to integers with a scale
and a zero point for 32 weights. Measured: the error of the logits, the loss, and the accuracy of each table, with 8 to
2 bits; and with 3 and 2 bits how much three methods keep, and their processor time: rounding to nearest, GPTQ, and
quantization-aware training (QAT), which trains on with weights that are rounded in every forward. As a control the
model is trained on for as long without rounding, and rounded after that.

Jacob et al. 2018 (QAT), Frantar et al. 2022 (GPTQ).
"""

# ledger: q.bits q.qat.better

import time
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from regard.adapt.fake_quantized import FakeQuantization, fake_quantize
from regard.adapt.quantized import quantize_linears
from regard.data.batch import Batch
from regard.formats.integers import Integer
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fine_tuning import mean_loss
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import small_decoder
from regard.labs.tasks import whole_rows
from regard.models.decoder import DecoderModule
from regard.quantization.quantize_model import quantize_model
from regard.quantization.select_layers import select_layers

SYMBOLS, WIDTH, ITEMS, ROWS = 32, 32, 8, 32
SIZES = {"32 facts": 1, "256 facts": 8, "1,024 facts": 32}  # name of a table: values of y
BITS, FEW = (8, 6, 5, 4, 3, 2), (3, 2)
NEAREST, GPTQ, QAT, CONTROL = "nearest", "GPTQ", "QAT", "trained on, nearest"
RATE, LATER_RATE = 6e-3, 2e-3  # of training, and of quantization-aware training and the control


class Tables:
    """Random tables z = T(x, y), and rows of items x y z after the symbol of their table."""

    def __init__(self, rng: torch.Generator):
        self.entries = [torch.randint(SYMBOLS, (SYMBOLS, n), generator=rng) for n in SIZES.values()]

    def rows(self, rng: torch.Generator, table: int, count: int) -> Batch:
        entries = self.entries[table]
        x, y = (torch.randint(n, (count, ITEMS), generator=rng) for n in entries.shape)
        items = torch.stack([x, y, entries[x, y]], -1).flatten(1)  # (B, 3 · ITEMS)
        ids = torch.cat([torch.full((count, 1), SYMBOLS + table), items], 1)
        weights = torch.arange(3 * ITEMS).expand(count, -1) % 3 == 2  # z is predicted at y
        return whole_rows(ids[:, :-1], ids[:, 1:], weights)

    def mixture(self, rng: torch.Generator, rows: int = ROWS) -> Batch:
        """Twice as many rows of a table as of the one before it."""
        parts = [self.rows(rng, table, rows * 2**table // 7 + 1) for table in range(len(SIZES))]
        return Batch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0].fields})


def run(bench: Bench) -> Findings:
    tables = Tables(generator(bench.seed))
    torch.manual_seed(bench.seed)
    model = small_decoder("attention", SYMBOLS + len(SIZES), WIDTH)
    fit(bench, "tables", model, tables.mixture, bench.training(1200, 2), RATE)
    tests = {name: tables.rows(generator(bench.seed + 1), i, 128) for i, name in enumerate(SIZES)}
    rounded = {bits: rounded_to_nearest(model, bits) for bits in BITS}
    known = {name: accuracy(model, test) for name, test in tests.items()}
    kept = {name: {bits: accuracy(other, test) for bits, other in rounded.items()} for name, test in tests.items()}
    losses = {bits: loss_of(other, tests) for bits, other in rounded.items()}
    errors = {bits: logit_error(model, other, tests) for bits, other in rounded.items()}
    found = {bits: compare(bench, model, tables, tests, bits) for bits in FEW}
    table = [
        {"bits": bits, "error of logits": errors.get(bits, 0.0), "loss": losses.get(bits, loss_of(model, tests))}
        | {name: kept[name].get(bits, known[name]) for name in SIZES}
        | {f"loss, {method}": found[bits][method][0] if bits in FEW else "" for method in (GPTQ, QAT, CONTROL)}
        for bits in (32, *BITS)
    ]  # fmt: skip
    lost = {bits: [known[name] - kept[name][bits] for name in SIZES] for bits in BITS}
    first = next((bits for bits in BITS if max(lost[bits]) >= 0.05), BITS[-1])
    easy, middle, hard = lost[first]
    fewer = list(zip(BITS, BITS[1:], strict=False))
    seconds = {method: max(found[bits][method][1] for bits in FEW) for method in (GPTQ, QAT)}
    checks = [
        Check("all tables are known before: accuracies above 0.99",
              ", ".join(f"{value:.3f}" for value in known.values()), min(known.values()) > 0.99),
        Check("the error of the logits grows with every step from 8 to 2 bits",
              ", ".join(f"{error:.2g}" for error in errors.values()), all(errors[a] < errors[b] for a, b in fewer)),
        Check("the loss grows with every step from 5 to 2 bits", ", ".join(f"{losses[b]:.3f}" for b in BITS),
              all(losses[a] < losses[b] for a, b in fewer[2:])),
        Check("with 8 bits every accuracy changes by at most 0.005",
              ", ".join(f"{kept[name][8]:.3f}" for name in SIZES),
              all(abs(kept[name][8] - known[name]) <= 0.005 for name in SIZES)),
        Check("hard first: with the most bits at which a table loses 0.05 of accuracy, a larger table loses more",
              f"{easy:.3f}, {middle:.3f} and {hard:.3f} with {first} bits", easy < middle < hard),
        *(Check(f"{bits} bits: the loss of QAT is below half of GPTQ's and below a quarter of rounding to nearest",
                ", ".join(f"{found[bits][method][0]:.3f}" for method in (QAT, GPTQ, NEAREST)),
                found[bits][QAT][0] < min(found[bits][GPTQ][0] / 2, found[bits][NEAREST][0] / 4)) for bits in FEW),
        Check("the rounding in training is what helps: trained on without it and rounded, the loss is more than twice "
              "that of QAT", ", ".join(f"{found[bits][CONTROL][0]:.3f}" for bits in FEW),
              all(found[bits][CONTROL][0] > 2 * found[bits][QAT][0] for bits in FEW)),
        Check("QAT costs more: at least five times the processor time of GPTQ",
              f"{seconds[QAT]:.1f} s and {seconds[GPTQ]:.2f} s", seconds[QAT] >= 5 * seconds[GPTQ]),
    ]  # fmt: skip
    methods = (NEAREST, GPTQ, CONTROL, QAT)
    plots = [
        Plot("bits", "accuracy", {name: [(bits, kept[name][bits]) for bits in BITS[::-1]] for name in SIZES},
             "rounded to nearest"),
        Plot("bits", "", {
            "error of the logits": [(bits, errors[bits]) for bits in BITS[::-1]],
            "loss": [(bits, losses[bits]) for bits in BITS[::-1]],
        }, "rounded to nearest", "y"),
        Plot("", "loss", {f"{bits} bits": [(i, found[bits][m][0]) for i, m in enumerate(methods)] for bits in FEW},
             groups=("nearest", "GPTQ", "trained on", "QAT")),
    ]  # fmt: skip
    remark = "The loss is the mean of the three tables, in nats. Embeddings and norms stay in float32."
    return Findings(table, checks, plots, remark)


def format_of(bits: int) -> Integer:
    return Integer(bits, symmetric=False, group=32)


def rounded_to_nearest(model: DecoderModule, bits: int) -> DecoderModule:
    other = deepcopy(model)
    quantize_linears(other, format_of(bits))
    return other


def compare(
    bench: Bench, model: DecoderModule, tables: Tables, tests: dict[str, Batch], bits: int
) -> dict[str, tuple[float, float]]:
    """The loss of each method, and its seconds of processor time."""
    steps, sample = bench.training(150, 2), tables.mixture(generator(bench.seed + 2), 128).tokens

    def by_gptq(other: DecoderModule) -> None:
        quantize_model(other, select_layers(other, format_of(bits), head=True), "gptq", [(sample, None)])

    def aware(other: DecoderModule) -> None:
        fake_quantize(other, FakeQuantization(format_of(bits), head=True))
        fit(bench, f"{bits} bits, QAT", other, tables.mixture, steps, LATER_RATE)

    def trained_on(other: DecoderModule) -> None:
        fit(bench, f"{bits} bits, control", other, tables.mixture, steps, LATER_RATE)
        quantize_linears(other, format_of(bits))

    def measure(change: Callable[[DecoderModule], object]) -> tuple[float, float]:
        other, start = deepcopy(model), time.process_time()
        change(other)
        return loss_of(other, tests), time.process_time() - start

    return {
        NEAREST: measure(lambda other: quantize_linears(other, format_of(bits))),
        GPTQ: measure(by_gptq),
        QAT: measure(aware),
        CONTROL: measure(trained_on),
    }


def loss_of(model: DecoderModule, tests: dict[str, Batch]) -> float:
    """The mean over the tables."""
    return sum(mean_loss(model, test) for test in tests.values()) / len(tests)


@torch.no_grad()
def logit_error(model: DecoderModule, other: DecoderModule, tests: dict[str, Batch]) -> float:
    """‖logits' - logits‖ / ‖logits‖"""

    def logits(of: DecoderModule) -> Tensor:
        return torch.cat([of(test.tokens) for test in tests.values()])

    expected = logits(model)
    return float((logits(other) - expected).norm() / expected.norm())
