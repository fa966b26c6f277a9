"""One setting for the labs of fine-tuning: a decoder learns a language of random rules, then N of the rules change.

In this language the next symbol follows from the last two by a rule with probability 0.9, and is drawn from all symbols
otherwise. A rule is a random fact, so N new rules are about N · log2(symbols) bits that follow from nothing else. The
base model is trained once per seed. Copies of it are tuned on the changed language, all weights (FullFT) or adapters
(LoRA), with Adam at a constant rate and on the same sequences. No sequence occurs twice, so the loss on held-out
sequences measures what was learned. At a constant rate the first steps of a long run are a short run, and one curve has
the losses of both.

    language, base = pretrain(bench)
    changed = language.change(256, generator(1))
    curve = tune(base, changed, LoRA(rank=4), 1e-3, steps=200, seed=0).curve      # (step, loss) points
"""

import math
import statistics
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.adapt.adapters import add_lora
from regard.adapt.lora import LoRA
from regard.data.batch import Batch
from regard.labs.experiment import Bench, Point
from regard.labs.fit import fit, generator
from regard.labs.small_models import small_decoder
from regard.labs.tasks import whole_rows
from regard.models.decoder import DecoderModule
from regard.objectives.next_token import next_token
from regard.training.faults import NonFinite
from regard.training.step import take_step

SYMBOLS, WIDTH, LENGTH, ROWS = 32, 128, 32, 16
FOLLOWED = 0.9  # the probability that a rule decides the next symbol
HELD_OUT, POINTS = 64, 20  # held-out sequences; points of a curve after the start


@dataclass(frozen=True)
class Language:
    rules: Tensor  # (last but one, last) -> next; a permutation in every column, so that all pairs are equally frequent

    @classmethod
    def draw(cls, rng: torch.Generator) -> "Language":
        return cls(torch.rand(SYMBOLS, SYMBOLS, generator=rng).argsort(0))

    def change(self, rules: int, rng: torch.Generator) -> "Language":
        """Another language with this many different rules: in every column the same number of successors moves."""
        each = rules // SYMBOLS
        assert each * SYMBOLS == rules and 2 <= each <= SYMBOLS, f"{rules} rules cannot change evenly"
        chosen = torch.rand(SYMBOLS, SYMBOLS, generator=rng).argsort(0)[:each]  # rows of every column
        return Language(self.rules.scatter(0, chosen, self.rules.gather(0, chosen.roll(1, 0))))

    def sequences(self, rng: torch.Generator, rows: int) -> Tensor:
        """(rows, LENGTH + 1)"""
        symbols = torch.randint(SYMBOLS, (rows, LENGTH + 1), generator=rng)
        follows = torch.rand(rows, LENGTH + 1, generator=rng) < FOLLOWED
        for i in range(2, LENGTH + 1):
            successors = self.rules[symbols[:, i - 2], symbols[:, i - 1]]
            symbols[:, i] = torch.where(follows[:, i], successors, symbols[:, i])
        return symbols

    def floor(self, sequences: Tensor) -> float:
        """The loss of a model that knows every rule, on these sequences."""
        other = (1 - FOLLOWED) / SYMBOLS
        as_ruled = self.rules[sequences[:, :-2], sequences[:, 1:-1]] == sequences[:, 2:]
        return -torch.where(as_ruled, math.log(FOLLOWED + other), math.log(other)).mean().item()


def rows_of(sequences: Tensor) -> Batch:
    """All symbols but the first two are predicted: those follow from nothing."""
    weights = torch.arange(LENGTH).expand(len(sequences), LENGTH) > 0
    return whole_rows(sequences[:, :-1], sequences[:, 1:], weights)


def pretrain(bench: Bench) -> tuple[Language, DecoderModule]:
    """A language, and the base model, which knows it."""
    language = Language.draw(generator(bench.seed))
    torch.manual_seed(bench.seed)
    model = small_decoder("attention", SYMBOLS, bench.setting(WIDTH, 32))
    steps = bench.training(800, 2)
    fit(bench, "base model", model, lambda rng: rows_of(language.sequences(rng, ROWS)), steps)
    return language, model


@dataclass(frozen=True)
class Tuned:
    model: DecoderModule
    curve: list[Point]  # (step, loss on held-out sequences), from step 0 on
    floor: float  # the loss of a model that knows every rule

    def loss_after(self, step: float | None = None) -> float:
        """The mean of the points in the last 15 % of the steps: single points vary at a constant rate."""
        last = self.curve[-1][0] if step is None else step
        return statistics.fmean(loss for at, loss in self.curve if 0.85 * last < at <= last)

    @property
    def learned(self) -> float:
        """The share of the loss that could be removed and was: 0 for the base model, 1 if all rules are known."""
        start = self.curve[0][1]
        return (start - self.loss_after()) / (start - self.floor)


def tune(
    base: DecoderModule,
    language: Language,
    lora: LoRA | None,
    rate: float,
    steps: int,
    seed: int,
    rows: int = ROWS,
) -> Tuned:
    """Tune a copy of the base model on the language: all weights without `lora`.

    Losses above that of the base model count as that one, and so do those after a run has diverged.
    """
    model = deepcopy(base)
    if lora is not None:
        add_lora(model, lora, seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
    held_out = language.sequences(generator(seed + 1), HELD_OUT)
    worst = mean_loss(model, rows_of(held_out))
    curve, diverged, every = [(0.0, worst)], False, max(1, steps // POINTS)
    for step, batch in enumerate(language.sequences(generator(seed), steps * rows).split(rows), 1):
        if not diverged:
            try:
                take_step(model.train(), next_token, rows_of(batch), optimizer)
            except NonFinite:
                diverged = True
        if step % every == 0:
            curve.append((float(step), worst if diverged else min(worst, mean_loss(model, rows_of(held_out)))))
    return Tuned(model, curve, language.floor(held_out))


@torch.no_grad()
def mean_loss(model: nn.Module, batch: Batch) -> float:
    loss, count, _ = next_token(model.eval(), batch)
    return (loss / count).item()
