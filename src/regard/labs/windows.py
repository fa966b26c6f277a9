"""Windows fail at distant needles, hops and copies even inside their span; one full layer in four restores them.

Decoders of four layers with RoPE: full attention, windows of 16 tokens, three windows and one full layer, and windows
with four first tokens that are always attended to. Four windows span 61 tokens, more than any task needs. Rows of 49
tokens: a needle in the first quarter is named at the end; two hops, where a pointer tells which of two marked values is
named; and a copy of 24 symbols, each from 24 tokens earlier. One model of each kind learns all three. Two others, with
full attention and with windows, learn only needles at random places, and are tested by distance. Cost: the time of a
forward of one layer of each kind, in the proportion of the model, at lengths where attention is expensive.

Beltagy et al. 2020; Jiang et al. 2023; Gemma Team 2024; Xiao et al. 2023. Small models, trained for minutes.
"""

# ledger: sp.window.fails
# ledger: sp.window.mistral
# ledger: sp.production

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.kernels.attention.mask import Causal, Mask
from regard.kernels.attention.patterns.window import SinksAndWindow, Window
from regard.labs.experiment import Bench, Check, Findings, Plot, Point
from regard.labs.fit import accuracy, fit, generator
from regard.labs.small_models import mixer_block
from regard.labs.tasks import FIRST, QUERY, draw_symbols, whole_rows
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.position.rope import Rope

SYMBOLS, VALUES, LENGTH, COPIED = 16, 8, 48, 24
NEEDLES = FIRST + SYMBOLS  # id of the first of VALUES needles
MARKED = NEEDLES + VALUES  # id of the first of 2 · VALUES marked values
POINTERS = MARKED + 2 * VALUES
WIDTH, SPAN = 64, 16
TaskDraw = Callable[[torch.Generator, int], Batch]
MASKS: dict[str, tuple[Mask, ...]] = {  # of the four layers
    "full": 4 * (Causal(),),
    "window": 4 * (Window(SPAN),),
    "1 in 4 full": (*2 * (Window(SPAN),), Causal(), Window(SPAN)),
    "window, first 4": 4 * (SinksAndWindow(4, SPAN - 4),),
}


def run(bench: Bench) -> Findings:
    steps = bench.training(450, 3)
    found: dict[str, dict[str, float]] = {}
    for name in MASKS:
        model = train(bench, name, name, list(TASKS.values()), steps)
        test = generator(10_000 + bench.seed)
        found[name] = {task: accuracy(model, draw(test, bench.setting(256, 4))) for task, draw in TASKS.items()}
    by_distance = {name: needles_by_distance(bench, name, steps) for name in ("full", "window")}
    lengths = bench.setting((4096, 16384), (64, 128))
    seconds = {n: layer_seconds(bench, n) for n in lengths}
    speed = {name: {n: 4 * seconds[n]["full"] / model_seconds(name, seconds[n]) for n in lengths} for name in MASKS}
    table = [{"attention": name} | found[name] | {f"speed at {n:,}": speed[name][n] for n in lengths} for name in MASKS]
    full, window, hybrid, first = found.values()
    checks = [
        *(Check(f"{task}: full attention learns it, with an accuracy above 0.9", f"{full[task]:.2f}", full[task] > 0.9)
          for task in TASKS),
        *(Check(f"{task}: windows have an accuracy lower by 0.2 or more, though their span is 61 tokens",
                f"{window[task]:.2f} and {full[task]:.2f}", window[task] <= full[task] - 0.2) for task in TASKS),
        *(Check(f"{task}: one full layer in four is within 0.05 of full attention",
                f"{hybrid[task]:.2f} and {full[task]:.2f}", hybrid[task] >= full[task] - 0.05) for task in TASKS),
        *(Check(f"needles anywhere: at {places:g} windows, full attention names at least 0.9 and windows less by "
                "0.2 or more", f"{far:.2f} and {near:.2f}", far >= 0.9 and near <= far - 0.2)
          for (places, far), (_, near) in zip(by_distance["full"][1:], by_distance["window"][1:], strict=True)),
        Check("four first tokens soften the failure: the mean accuracy is higher than that of windows alone",
              f"{mean(first):.2f} and {mean(window):.2f}", mean(first) > mean(window)),
        Check(f"at {lengths[-1]:,} tokens the attention of one in four is 2 to 10 times as fast as full attention",
              f"{speed['1 in 4 full'][lengths[-1]]:.1f}x", 2 <= speed["1 in 4 full"][lengths[-1]] <= 10),
    ]  # fmt: skip
    bars = {name: [(i, values[task]) for i, task in enumerate(TASKS)] for name, values in found.items()}
    costs = {name: [(float(n), times) for n, times in speed[name].items()] for name in MASKS}
    plots = [
        Plot("", "accuracy", bars, f"rows of {LENGTH + 1} tokens", groups=tuple(TASKS)),
        Plot("distance of the needle, in windows (at most)", "accuracy", by_distance, "needles at random places"),
        Plot("sequence length", "times as fast as full", costs, "forward of the attention layers", "xy"),
    ]
    return Findings(table, checks, plots, f"Guessing: {1 / VALUES:.2f}, copies {1 / SYMBOLS:.2f}. {steps} steps each.")


def mean(values: dict[str, float]) -> float:
    return statistics.fmean(values.values())


def train(bench: Bench, label: str, name: str, tasks: Sequence[TaskDraw], steps: int) -> DecoderModule:
    """A model with the masks of this name; its steps take turns among the tasks."""
    torch.manual_seed(bench.seed)
    blocks = [mixer_block(Attention(4, mask=mask, position=Rope()), WIDTH) for mask in MASKS[name]]
    model = Decoder(POINTERS + 2, WIDTH, tuple(Repeat((block,)) for block in blocks)).build()
    turn = iter(range(steps))
    fit(bench, label, model, lambda rng: tasks[next(turn) % len(tasks)](rng, 24), steps, 3e-3)
    return model


def needles_by_distance(bench: Bench, name: str, steps: int) -> list[Point]:
    """The accuracy of a model that learns only needles, for distances of up to one, two and three windows."""
    model = train(bench, f"{name}, needles", name, [partial(needle, last=LENGTH)], steps)
    test, rows, found = generator(10_000 + bench.seed), bench.setting(256, 4), []
    for windows in range(1, LENGTH // SPAN + 1):
        last = LENGTH - (windows - 1) * SPAN  # the question is at place LENGTH
        found.append((float(windows), accuracy(model, needle(test, rows, last - SPAN, last))))
    return found


def needle(rng: torch.Generator, rows: int, first: int = 0, last: int = LENGTH // 4) -> Batch:
    """A needle at a place from `first` to before `last`, to be named at the end."""
    tokens, every = draw_symbols(rng, SYMBOLS, rows, LENGTH), torch.arange(rows)
    needles = torch.randint(NEEDLES, NEEDLES + VALUES, (rows,), generator=rng)
    tokens[every, torch.randint(first, last, (rows,), generator=rng)] = needles
    return ask(tokens, needles)


def hops(rng: torch.Generator, rows: int) -> Batch:
    """Two marked values and a pointer in random order; the value whose mark is that of the pointer is named."""
    tokens, every = draw_symbols(rng, SYMBOLS, rows, LENGTH), torch.arange(rows)
    values = torch.randint(VALUES, (rows, 2), generator=rng)
    pointer = torch.randint(2, (rows,), generator=rng)
    places = torch.rand(rows, LENGTH, generator=rng).argsort(1)
    for mark in range(2):
        tokens[every, places[:, mark]] = MARKED + mark * VALUES + values[:, mark]
    tokens[every, places[:, 2]] = POINTERS + pointer
    return ask(tokens, NEEDLES + values[every, pointer])


def ask(tokens: Tensor, answers: Tensor) -> Batch:
    tokens = torch.cat([tokens, torch.full((len(tokens), 1), QUERY)], 1)
    targets, weights = tokens.clone(), torch.zeros(tokens.shape)
    targets[:, -1], weights[:, -1] = answers, 1
    return whole_rows(tokens, targets, weights)


def copy(rng: torch.Generator, rows: int) -> Batch:
    """COPIED symbols, and the same again."""
    symbols = draw_symbols(rng, SYMBOLS, rows, COPIED)
    tokens = torch.cat([symbols, symbols], 1)
    weights = (torch.arange(2 * COPIED) >= COPIED - 1).expand(rows, 2 * COPIED)
    return whole_rows(tokens[:, :-1], tokens[:, 1:], weights[:, :-1])


TASKS = {"needle": needle, "hops": hops, "copy": copy}


@torch.inference_mode()
def layer_seconds(bench: Bench, length: int) -> dict[str, float]:
    """Median seconds of one layer of attention with 256 of `length` keys in a window, first tokens too, or all."""
    torch.manual_seed(bench.seed)
    masks: dict[str, Mask] = {"full": Causal(), "window": Window(256), "first": SinksAndWindow(4, 252)}
    layers = {name: Attention(4, mask=mask, position=Rope()).build(WIDTH).eval() for name, mask in masks.items()}
    x, times = torch.randn(1, length, WIDTH), {name: [] for name in layers}
    for _ in range(bench.setting(4, 2)):
        for name, layer in layers.items():
            start = time.perf_counter()
            layer(x, TokenLayout.whole(1, length))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first is a warm-up


def model_seconds(name: str, seconds: dict[str, float]) -> float:
    """The time of the four layers of a model."""
    kind: dict[type[Mask], str] = {Causal: "full", Window: "window", SinksAndWindow: "first"}
    return sum(seconds[kind[type(mask)]] for mask in MASKS[name])
