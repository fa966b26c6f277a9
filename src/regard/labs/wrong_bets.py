"""Cheap attention bets on a structure and loses where the bet is wrong; linear attention loses recall first.

Encoders of one layer that differ in the mixer only: full attention, a window of four tokens on each side, low rank
(Linformer, 4 combinations of 32 tokens), and linear attention (elu features, 8 per head). Three tasks. Near: the
previous token of every token, which suits the window. Summary: the most common of four symbols of the row, for which
one mean over all tokens is enough, which suits low rank and linear attention and not the window. Recall: 2 to 16
records, each a key and its value in one token, at random places of the first half of the row, and the second half asks
for the keys in another order: neither near nor of low rank, and more records than a head of linear attention has
features.

Wang et al. 2020; Katharopoulos et al. 2020; Arora et al. 2023.
"""

# ledger: sp.misfit
# ledger: lin.weaker

from functools import partial

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.window import Window
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import MakeBatch, accuracy, fit, generator
from regard.labs.small_models import mixer_block
from regard.labs.tasks import FILLER, draw_symbols, whole_rows
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import MaskedLM
from regard.models.stack import Repeat
from regard.objectives.masked import masked
from regard.parts.attention import Attention
from regard.parts.body import Body
from regard.parts.input import Tokens
from regard.parts.linear_attention import LinearAttention
from regard.parts.linformer import Linformer
from regard.parts.norm import RMSNorm
from regard.parts.position.learned import Learned

KEYS, VALUES, LENGTH, WIDTH, HEADS = 16, 8, 32, 64, 8
QUERIES = 1  # id of the first of KEYS queries
ANSWERS = QUERIES + KEYS  # id of the first of VALUES answers, which only occur as targets
RECORDS = ANSWERS + VALUES  # id of the record of key 0 and value 0
VOCAB = RECORDS + KEYS * VALUES
SYMBOLS, COMMON = 16, 4  # symbols of the near task, and of the summary
MIXERS: dict[str, Body] = {
    "full": Attention(HEADS, mask=Full()),
    "window": Attention(HEADS, mask=Window(4, causal=False)),
    "low rank": Linformer(HEADS, LENGTH, rank=4),
    "linear": LinearAttention(HEADS, bidirectional=True),
}


def run(bench: Bench) -> Findings:
    steps, counts = bench.training(240, 3), bench.setting((2, 4, 8, 16), (2, 16))
    found: dict[str, dict[str, float]] = {}
    recall: dict[str, list[tuple[float, float]]] = {}
    for name in MIXERS:
        test, rows = generator(10_000 + bench.seed), bench.setting(128, 4)
        near = train(bench, f"near: {name}", name, near_task, 2 * steps // 3)
        summary = train(bench, f"summary: {name}", name, summary_task, steps // 2)
        records = train(bench, f"recall: {name}", name, partial(any_count, counts=counts), steps)
        recall[name] = [(float(n), accuracy(records, recall_task(test, rows, n))) for n in counts]
        found[name] = {"near": accuracy(near, near_task(test, rows)),
                       "summary": accuracy(summary, summary_task(test, 2 * rows)),
                       "recall": recall[name][-1][1]}  # fmt: skip
    full, linear = found["full"], found["linear"]
    few = {name: points[0][1] for name, points in recall.items()}
    lost = {task: full[task] - linear[task] for task in full}

    def right(name: str, task: str) -> Check:
        return Check(f"{task}: {name}, whose bet is right, is within 0.05 of full attention",
                     f"{found[name][task]:.2f} and {full[task]:.2f}",
                     found[name][task] >= full[task] - 0.05)  # fmt: skip

    def wrong(name: str, task: str) -> Check:
        return Check(f"{task}: {name}, whose bet is wrong, is below full attention by 0.2 or more",
                     f"{found[name][task]:.2f} and {full[task]:.2f}",
                     found[name][task] <= full[task] - 0.2)  # fmt: skip

    checks = [
        Check("full attention learns near, summary and recall: above 0.9",
              ", ".join(f"{value:.2f}" for value in full.values()), min(full.values()) > 0.9),
        right("window", "near"), wrong("window", "summary"), wrong("window", "recall"),
        right("low rank", "summary"), wrong("low rank", "near"), wrong("low rank", "recall"),
        right("linear", "summary"), wrong("linear", "recall"),
        Check("linear attention loses recall first: more than it loses of the near task and of the summary",
              ", ".join(f"{task} {loss:.2f}" for task, loss in lost.items()),
              lost["recall"] > max(lost["near"], lost["summary"])),
        Check(f"and more of {counts[-1]} records than of {counts[0]}, by 0.1 or more",
              f"{lost['recall']:.2f} and {few['full'] - few['linear']:.2f}",
              lost["recall"] >= few["full"] - few["linear"] + 0.1),
    ]  # fmt: skip
    table = [
        {"mixer": name, "near": found[name]["near"], "summary": found[name]["summary"]}
        | {f"{n:g} records": share for n, share in recall[name]}
        for name in MIXERS
    ]
    bars = {name: list(enumerate(values.values())) for name, values in found.items()}
    groups = ("near", "summary", f"{counts[-1]} records")
    plots = [
        Plot("", "accuracy", bars, "three tasks", groups=groups),
        Plot("records", "accuracy", recall, "recall", "x"),
    ]
    guesses = f"near {1 / SYMBOLS:.2f}, summary {1 / COMMON:.2f}, recall {1 / VALUES:.2f}"
    return Findings(table, checks, plots, f"Guessing: {guesses}.")


def train(bench: Bench, label: str, mixer: str, make_batch: MakeBatch, steps: int) -> EncoderModule:
    torch.manual_seed(bench.seed)
    layers = (
        Repeat(
            (mixer_block(MIXERS[mixer], WIDTH),),
        ),
    )
    model = Encoder(Tokens(VOCAB), WIDTH, layers, Learned(LENGTH), norm=RMSNorm(), head=MaskedLM()).build()
    fit(bench, label, model, make_batch, steps, 1e-2, stop_below=0.05, objective=masked)
    return model


def near_task(rng: torch.Generator, rows: int = 32) -> Batch:
    """The target of each token is the token before it."""
    tokens = draw_symbols(rng, SYMBOLS, rows, LENGTH)
    return whole_rows(tokens, tokens.roll(1, 1), (torch.arange(LENGTH) > 0).expand(rows, LENGTH))


def summary_task(rng: torch.Generator, rows: int = 32) -> Batch:
    """The target of every token is the row's most common symbol, which is drawn more often than the others."""
    favourite = draw_symbols(rng, COMMON, rows, 1)
    favoured = torch.rand(rows, LENGTH, generator=rng) < 0.15
    tokens = favourite.where(favoured, draw_symbols(rng, COMMON, rows, LENGTH))
    counts = torch.nn.functional.one_hot(tokens).sum(1)  # (B, symbols)
    return whole_rows(tokens, counts.argmax(1, keepdim=True).expand_as(tokens), torch.ones_like(tokens))


def any_count(rng: torch.Generator, counts: tuple[int, ...]) -> Batch:
    return recall_task(rng, 32, counts[int(torch.randint(len(counts), (), generator=rng))])


def recall_task(rng: torch.Generator, rows: int, count: int) -> Batch:
    """Records at random places of the first half, and at random places of the second half the queries of their keys."""
    half = LENGTH // 2

    def shuffled(size: int) -> Tensor:
        return torch.rand(rows, size, generator=rng).argsort(1)

    keys = shuffled(KEYS)[:, :count]
    values = torch.randint(VALUES, (rows, count), generator=rng)
    stored = torch.full((rows, half), FILLER).scatter(1, shuffled(half)[:, :count], RECORDS + keys * VALUES + values)
    order = shuffled(count)
    places = shuffled(half)[:, :count]
    asked = torch.full((rows, half), FILLER).scatter(1, places, QUERIES + keys.gather(1, order))
    answers = torch.full((rows, half), FILLER).scatter(1, places, ANSWERS + values.gather(1, order))
    unasked = torch.zeros(rows, half)
    return whole_rows(
        torch.cat([stored, asked], 1),
        torch.cat([stored, answers], 1),
        torch.cat([unasked, unasked.scatter(1, places, 1.0)], 1),
    )
