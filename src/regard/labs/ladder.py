"""From the feed-forward net to the transformer, each model of the lineage removes one limit of its predecessor.

The models, and the limit that each removes:

    RNN            sequences of any length (a window covers only the last tokens)
    LSTM, GRU      long gaps (a plain recurrence forgets)
    seq2seq        outputs that are not aligned with inputs: here, reversal
    + attention    long sources (one state cannot hold them)
    transformer    speed (a recurrence computes token by token), with all of the above

Each model solves every task in its own form: the first four have one output per token of the source; the last three
read the whole source and then generate. A new model is trained for each task, all in the same way. Measured: the share
of sequences without a mistake. The transformer is faster only on a machine with many parallel units, so on a CPU the
time per step is shown but not judged; the lab serial-time measures the part that a CPU shows.
"""

# ledger: anc.ladder

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.kernels.attention.mask import Full
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import exact_match, fit, generator, step_seconds
from regard.labs.small_models import MIXERS, decoder_spec, parameter_count
from regard.labs.tasks import FIRST, QUERY, decoder_batch, draw_symbols, encoder_decoder_batch
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
    encoder = Block((Sublayer(Attention(4, mask=Full())), Sublayer(SwiGLU(2 * WIDTH))))
    decoder = Block((Sublayer(Attention(4)), Sublayer(CrossAttention(4)), Sublayer(SwiGLU(2 * WIDTH))))
    return EncoderDecoder(
        Encoder(Tokens(VOCAB), WIDTH, (Repeat((encoder,), 2),), Sinusoidal(), norm=RMSNorm()),
        Decoder(VOCAB, WIDTH, (Repeat((decoder,), 2),), Sinusoidal()),
    )


MODELS: dict[str, Callable[[], Model[Any]]] = {
    "feed-forward": lambda: decoder_spec(MIXERS["window"], VOCAB, WIDTH, 1),
    "RNN": lambda: decoder_spec(MIXERS["RNN"], VOCAB, WIDTH),
    "LSTM": lambda: decoder_spec(MIXERS["LSTM"], VOCAB, WIDTH),
    "GRU": lambda: decoder_spec(MIXERS["GRU"], VOCAB, WIDTH),
    "seq2seq": lambda: seq2seq(VOCAB, WIDTH),
    "+ attention": lambda: seq2seq(VOCAB, WIDTH, attention="general"),
    "transformer": transformer,
}


def first_of(length: int, shortest: int | None = None) -> Task:
    """The target is the first symbol of a sequence of `shortest` to `length` symbols."""

    def task(rng: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        symbols = int(torch.randint(shortest or length, length + 1, (), generator=rng))
        source = draw_symbols(rng, SYMBOLS, rows, symbols)
        return torch.cat([source, torch.full((rows, 1), QUERY)], 1), source[:, :1]

    return task


def reversal(length: int) -> Task:
    def task(rng: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        source = draw_symbols(rng, SYMBOLS, rows, length)
        return source, source.flip(1)

    return task


def run(bench: Bench) -> Findings:
    gap, long, steps = bench.setting(40, 4), bench.setting(24, 4), bench.training(1200, 2)
    tasks: dict[str, Task] = {
        "order": first_of(4),
        "any length": first_of(12, 2),
        "long gap": first_of(gap),
        "reversal": reversal(4),
        "long source": reversal(long),
    }
    solved = {name: {task: train(bench, name, task, make, steps) for task, make in tasks.items()} for name in MODELS}
    long_sequences = reversal(bench.setting(512, 8))(generator(bench.seed), 4)
    models = {name: make().build() for name, make in MODELS.items()}
    times = step_seconds(
        models, lambda model: objective(model, batch_for(model, long_sequences))[0], bench.setting(5, 1)
    )
    table = [
        {"model": name, "parameters": parameter_count(models[name])} | shares | {"ms per step": 1000 * times[name]}
        for name, shares in solved.items()
    ]

    def removes_limit(task: str, before: str, *after: str) -> Check:
        observed = ", ".join(f"{name} {solved[name][task]:.2f}" for name in (before, *after))
        holds = solved[before][task] < 0.5 and min(solved[name][task] for name in after) > 0.9
        return Check(f"{task}: {' and '.join(after)} can solve it, {before} cannot", observed, holds)

    checks = [
        removes_limit("any length", "feed-forward", "RNN"),
        removes_limit("long gap", "RNN", "LSTM", "GRU"),
        removes_limit("reversal", "LSTM", "seq2seq"),
        removes_limit("long source", "seq2seq", "+ attention"),
        Check("the transformer, without recurrence, solves every task",
              ", ".join(f"{task} {share:.2f}" for task, share in solved["transformer"].items()),
              min(solved["transformer"].values()) > 0.9),
    ]  # fmt: skip
    lines = {name: list(enumerate(shares.values())) for name, shares in solved.items()}
    plots = [Plot("", "exact match", lines, "all tasks", groups=tuple(tasks))]
    remark = (
        "Speed is not judged. On a CPU a step on long sequences takes the transformer longer than the recurrence with "
        "attention, since it has more layers and n² scores. It has only as many dependent steps as layers, which is an "
        "advantage on machines with many parallel units."
    )
    return Findings(table, checks, plots, remark)


def is_encoder_decoder(model: nn.Module) -> bool:
    return isinstance(model.spec, EncoderDecoder)


def batch_for(model: nn.Module, source_and_target: tuple[Tensor, Tensor]) -> Batch:
    return (encoder_decoder_batch if is_encoder_decoder(model) else decoder_batch)(*source_and_target)


def objective(model: nn.Module, batch: Batch) -> LossResult:
    return (translation if is_encoder_decoder(model) else next_token)(model, batch)


def train(bench: Bench, name: str, task: str, make: Task, steps: int) -> float:
    torch.manual_seed(bench.seed)
    model = MODELS[name]().build()

    def batch(rng: torch.Generator) -> Batch:
        return batch_for(model, make(rng, 32))

    fit(bench, f"{task}, {name}", model, batch, steps, stop_below=0.02, objective=objective)
    test = generator(bench.seed + 1)
    return sum(exact_match(model, batch(test)) for _ in range(16)) / 16
