"""Cheap attention bets on a structure and loses where the bet is wrong; linear attention loses recall first.

Encoders of two layers that differ in the mixer only: full attention, a window of four tokens on each side, linear
attention (elu features), and low rank (Linformer, 8 combinations of 64 tokens). A local task: the previous token of
every token. A distant task: 4 to 32 records, each a key and its value in one token, stand at random places, and the
second half of the row asks for the keys in another order. The window bets on near tokens, low rank on few combinations
of tokens, which cannot keep all neighbours apart, and linear attention on a state of 16 features per head.

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

KEYS, VALUES, LENGTH, WIDTH = 32, 8, 64, 64
QUERIES = 1  # id of the first of KEYS queries
ANSWERS = QUERIES + KEYS  # id of the first of VALUES answers, which only occur as targets
RECORDS = ANSWERS + VALUES  # id of the record of key 0 and value 0
VOCAB = RECORDS + KEYS * VALUES
MIXERS: dict[str, Body] = {
    "full": Attention(4, mask=Full()),
    "window": Attention(4, mask=Window(4, causal=False)),
    "linear": LinearAttention(4, bidirectional=True),
    "low rank": Linformer(4, LENGTH, rank=8),
}


def run(bench: Bench) -> Findings:
    steps, counts = bench.training(400, 2), bench.setting((4, 8, 16, 32), (4, 32))
    local, recall = {}, {}
    for name in MIXERS:
        on_local = train(bench, f"local: {name}", name, previous_tokens, steps // 2)
        local[name] = accuracy(on_local, previous_tokens(generator(10_000 + bench.seed)))
        on_records = train(bench, f"distant: {name}", name, partial(any_count, counts=counts), steps)
        test = generator(10_000 + bench.seed)
        recall[name] = [(float(n), accuracy(on_records, records(test, n, bench.setting(128, 4)))) for n in counts]
    few, many = ({name: points[i][1] for name, points in recall.items()} for i in (0, -1))

    def pair(values: dict[str, float], *names: str) -> str:
        return ", ".join(f"{name} {values[name]:.2f}" for name in names)

    checks = [
        Check("full attention learns both tasks: above 0.95", f"local {local['full']:.2f}, distant {many['full']:.2f}",
              min(local["full"], many["full"]) > 0.95),
        Check("the window learns the local task: above 0.95", f"{local['window']:.2f}", local["window"] > 0.95),
        Check("the window loses the distant one: 0.3 or more below full attention, whatever the number of records",
              pair(few, "window", "full"), max(few["window"] - few["full"], many["window"] - many["full"]) <= -0.3),
        Check("low rank loses the local task, where it cannot keep neighbours apart: 0.1 or more below full attention",
              pair(local, "low rank", "full"), local["low rank"] <= local["full"] - 0.1),
        Check(f"linear attention recalls {counts[-1]} records worse than full attention, by 0.1 or more",
              pair(many, "linear", "full"), many["linear"] <= many["full"] - 0.1),
        Check("linear attention learns the local task as well as full attention, within 0.05",
              pair(local, "linear", "full"), local["linear"] >= local["full"] - 0.05),
        Check("linear attention loses more of many records than of few",
              f"{few['linear']:.2f} of {counts[0]}, {many['linear']:.2f} of {counts[-1]}",
              few["full"] - few["linear"] < many["full"] - many["linear"]),
    ]  # fmt: skip
    table = [
        {"mixer": name, "local": local[name]} | {f"{n:g} records": share for n, share in recall[name]}
        for name in MIXERS
    ]
    plots = [
        Plot("", "accuracy", {"": list(enumerate(local.values()))}, "local: the previous token", groups=tuple(local)),
        Plot("records", "accuracy", recall, "distant: values of keys", "x"),
    ]
    return Findings(table, checks, plots, f"Guessing: {1 / (KEYS - 1):.2f} (local), {1 / VALUES:.2f} (distant).")


def train(bench: Bench, label: str, mixer: str, make_batch: MakeBatch, steps: int) -> EncoderModule:
    torch.manual_seed(bench.seed)
    layers = (Repeat((mixer_block(MIXERS[mixer], WIDTH),), 2),)
    model = Encoder(Tokens(VOCAB), WIDTH, layers, Learned(LENGTH), norm=RMSNorm(), head=MaskedLM()).build()
    fit(bench, label, model, make_batch, steps, 4e-3, stop_below=0.02, objective=masked)
    return model


def previous_tokens(rng: torch.Generator, rows: int = 16) -> Batch:
    """Random queries; the target of each is the token before it."""
    tokens = draw_symbols(rng, KEYS - 1, rows, LENGTH)
    return whole_rows(tokens, tokens.roll(1, 1), (torch.arange(LENGTH) > 0).expand(rows, LENGTH))


def any_count(rng: torch.Generator, counts: tuple[int, ...]) -> Batch:
    return records(rng, counts[int(torch.randint(len(counts), (), generator=rng))])


def records(rng: torch.Generator, count: int, rows: int = 16) -> Batch:
    """Records at random places of the first half, and at random places of the second half the queries of their keys."""
    half = LENGTH // 2

    def shuffled(size: int) -> Tensor:
        return torch.rand(rows, size, generator=rng).argsort(1)

    keys = shuffled(KEYS)[:, :count]
    values = torch.randint(VALUES, (rows, count), generator=rng)
    stored = torch.full((rows, half), FILLER).scatter(1, shuffled(half)[:, :count], RECORDS + keys * VALUES + values)
    places = shuffled(half)[:, :count]
    asked = torch.full((rows, half), FILLER).scatter(1, places, QUERIES + keys)
    answers = torch.full((rows, half), FILLER).scatter(1, places, ANSWERS + values)
    unasked = torch.zeros(rows, half)
    return whole_rows(
        torch.cat([stored, asked], 1),
        torch.cat([stored, answers], 1),
        torch.cat([unasked, unasked.scatter(1, places, 1.0)], 1),
    )
