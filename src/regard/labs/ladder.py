"""From the feed-forward net to the transformer, each step of the lineage repairs one limit of the one before.

Six rungs and what each is said to repair:

    RNN            a text of any length (a window sees only its last tokens)
    LSTM, GRU      a long gap (a plain recurrence forgets)
    seq2seq        what is written need not stand beside what is read: here, backwards
    + attention    a long source (one state cannot hold it)
    transformer    speed (a recurrence goes token by token), with all that was won before

Each plays every task in its own form: the first four answer while they read, one output a token; the last three read
the source whole and then write. A new model for each task, all trained alike. Measured: the share of texts with no
mistake. The last repair is time on a machine that does many things at once, which a CPU is not: a step's time is shown,
not judged (serial-time shows what a CPU can show).
"""

# ledger: anc.ladder

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.kernels.attention.mask import Full
from regard.labs.bench import Bench
from regard.labs.contenders import MIXERS, parameters, spec
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import exact, fit, generator, interleaved
from regard.labs.tasks import ASK, FIRST, draw, of_source, while_reading
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.seq2seq import seq2seq
from regard.models.stack import Repeat
from regard.objectives.base import LossResult
from regard.objectives.next_token import next_token
from regard.objectives.translation import translation
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import RMSNorm
from regard.parts.position.sinusoidal import Sinusoidal

SYMBOLS, WIDTH = 8, 64
VOCAB = FIRST + SYMBOLS
Task = Callable[[torch.Generator, int], tuple[Tensor, Tensor]]  # rows -> source and target


def transformer() -> EncoderDecoder:
    reads = Block((Sublayer(Attention(4, mask=Full())), Sublayer(SwiGLU(2 * WIDTH))))
    writes = Block((Sublayer(Attention(4)), Sublayer(CrossAttention(4)), Sublayer(SwiGLU(2 * WIDTH))))
    return EncoderDecoder(
        Encoder(Tokens(VOCAB), WIDTH, (Repeat((reads,), 2),), Sinusoidal(), norm=RMSNorm()),
        Decoder(VOCAB, WIDTH, (Repeat((writes,), 2),), Sinusoidal()),
    )


RUNGS: dict[str, Callable[[], Model[Any]]] = {
    "feed-forward": lambda: spec(MIXERS["window"], VOCAB, WIDTH, 1),
    "RNN": lambda: spec(MIXERS["RNN"], VOCAB, WIDTH),
    "LSTM": lambda: spec(MIXERS["LSTM"], VOCAB, WIDTH),
    "GRU": lambda: spec(MIXERS["GRU"], VOCAB, WIDTH),
    "seq2seq": lambda: seq2seq(VOCAB, WIDTH),
    "+ attention": lambda: seq2seq(VOCAB, WIDTH, attention="general"),
    "transformer": transformer,
}


def first_of(length: int, shortest: int | None = None) -> Task:
    """Which symbol stood first, in texts of up to this length?"""

    def task(draws: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        symbols = int(torch.randint(shortest or length, length + 1, (), generator=draws))
        source = draw(draws, SYMBOLS, rows, symbols)
        return torch.cat([source, torch.full((rows, 1), ASK)], 1), source[:, :1]

    return task


def backwards(length: int) -> Task:
    def task(draws: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        source = draw(draws, SYMBOLS, rows, length)
        return source, source.flip(1)

    return task


def run(bench: Bench) -> Findings:
    gap, long, steps = bench.pick(40, 4), bench.pick(24, 4), bench.pick(1200, 2)
    tasks: dict[str, Task] = {
        "order": first_of(4),
        "any length": first_of(12, 2),
        "long gap": first_of(gap),
        "backwards": backwards(4),
        "long source": backwards(long),
    }
    solved = {name: {task: share(bench, name, task, make, steps) for task, make in tasks.items()} for name in RUNGS}
    texts = backwards(bench.pick(512, 8))(generator(bench.seed), 4)
    models = {name: make().build() for name, make in RUNGS.items()}
    times = interleaved(models, lambda model: objective(model, posed(model, texts))[0], bench.pick(5, 1))
    table = [
        {"rung": name, "parameters": parameters(models[name])} | right | {"ms a step": 1000 * times[name]}
        for name, right in solved.items()
    ]

    def repairs(task: str, before: str, *after: str) -> Check:
        seen = ", ".join(f"{name} {solved[name][task]:.2f}" for name in (before, *after))
        holds = solved[before][task] < 0.5 and min(solved[name][task] for name in after) > 0.9
        return Check(f"{task}: {' and '.join(after)} can, {before} cannot", seen, holds)

    checks = [
        repairs("any length", "feed-forward", "RNN"),
        repairs("long gap", "RNN", "LSTM", "GRU"),
        repairs("backwards", "LSTM", "seq2seq"),
        repairs("long source", "seq2seq", "+ attention"),
        Check("the transformer, without recurrence, solves every task",
              ", ".join(f"{task} {right:.2f}" for task, right in solved["transformer"].items()),
              min(solved["transformer"].values()) > 0.9),
    ]  # fmt: skip
    lines = {name: list(enumerate(right.values())) for name, right in solved.items()}
    plots = [Plot("", "texts without mistake", lines, "the suite", groups=tuple(tasks))]
    remark = (
        f"Speed is not judged. A step on long texts takes the transformer {1000 * times['transformer']:.0f} ms and the "
        f"recurrence with attention {1000 * times['+ attention']:.0f} ms here: it has more layers and n² scores. Only "
        "as many of its steps as it has layers wait for each other; that pays where many things are done at once."
    )
    return Findings(table, checks, plots, remark)


def reads_first(model: nn.Module) -> bool:
    return isinstance(model.spec, EncoderDecoder)


def posed(model: nn.Module, texts: tuple[Tensor, Tensor]) -> Batch:
    """A task in the form in which a model plays it."""
    return (of_source if reads_first(model) else while_reading)(*texts)


def objective(model: nn.Module, batch: Batch) -> LossResult:
    return (translation if reads_first(model) else next_token)(model, batch)


def share(bench: Bench, name: str, task: str, make: Task, steps: int) -> float:
    torch.manual_seed(bench.seed)
    model = RUNGS[name]().build()

    def batch(draws: torch.Generator) -> Batch:
        return posed(model, make(draws, 32))

    fit(bench, f"{task}, {name}", model, batch, steps, enough=0.02, objective=objective)
    test = generator(bench.seed + 1)
    return sum(exact(model, batch(test)) for _ in range(16)) / 16
