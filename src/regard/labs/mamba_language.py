"""Mamba models language about as well as attention for as many parameters and tokens, in time linear in the length.

The data are stories of the small world in byte-pair tokens, in rows of 256. Every model is trained once on the same
rows; the feed-forward layers are as wide as needed for equal numbers of parameters. Measured: the loss on held-out
stories, and tokens per second of training (forward and backward) by sequence length. Time that grows as n^e has e = 1
if it is linear and 2 if it is quadratic; the overhead of short sequences lowers the exponent. Which model is faster at
a given length depends on the machine and its kernels. S4D, whose filter is the same for all tokens, is included for
comparison.

Gu & Dao 2023; Dao & Gu 2024. Results of small models on a small world need not hold for large ones.
"""

# ledger: mamba.language

import math
from itertools import islice

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.world import stories
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator, step_seconds
from regard.labs.small_models import MIXERS, matched_spec, parameter_count
from regard.labs.tasks import whole_rows
from regard.models.decoder import DecoderModule
from regard.objectives.next_token import next_token
from regard.parts.body import Body
from regard.parts.ssm.mamba2 import Mamba2
from regard.text.train import bpe

VOCAB, WIDTH, ROW = 384, 64, 256
COMPARED: dict[str, Body] = {
    "attention": MIXERS["attention"],
    "Mamba": MIXERS["Mamba"],
    "Mamba-2": Mamba2(state=32, head_dim=32),
    "S4D": MIXERS["S4D"],
}


def run(bench: Bench) -> Findings:
    steps, rows = bench.training(200, 2), bench.setting(8, 2)
    train, held_out = encode_stories(bench.setting(3000, 40), bench.setting(200, 20))
    losses, models = {}, {}
    for name, mixer in COMPARED.items():
        torch.manual_seed(bench.seed)
        models[name] = matched_spec(mixer, COMPARED["attention"], VOCAB, WIDTH).build()
        fit(bench, name, models[name], lambda rng: draw_rows(rng, train, rows), steps, 4e-3)
        losses[name] = held_out_loss(models[name], held_out, bench.setting(16, 2))
    speeds = tokens_per_second(bench, models)
    lengths = [n for n, _ in speeds["attention"]]
    table = [
        {"mixer": name, "parameters": parameter_count(models[name]), "held-out loss": losses[name]}
        | {f"tokens/s at {n:,.0f}": speed for n, speed in speeds[name]}
        for name in COMPARED
    ]
    exponents = {name: exponent(points) for name, points in speeds.items()}
    span = f"from {lengths[0]:,} to {lengths[-1]:,} tokens"
    checks = [
        Check("Mamba's loss is at most 2 % above attention's", f"{losses['Mamba']:.3f} and {losses['attention']:.3f}",
              losses["Mamba"] < 1.02 * losses["attention"]),
        Check("Mamba's loss is below that of a fixed filter", f"{losses['Mamba']:.3f} and S4D {losses['S4D']:.3f}",
              losses["Mamba"] < losses["S4D"]),
        Check(f"{span} Mamba's time is linear: its exponent is nearer to 1 than to 1.5",
              f"n^{exponents['Mamba']:.2f}", exponents["Mamba"] < 1.25),
        Check("attention's time is not linear: its exponent is above 1.25",
              f"n^{exponents['attention']:.2f}", exponents["attention"] > 1.25),
    ]  # fmt: skip
    plots = [
        Plot("", "nats per token", {"": list(enumerate(losses.values()))}, "held-out stories", groups=tuple(losses)),
        Plot("sequence length", "tokens per second", speeds, "training", "xy"),
    ]
    return Findings(table, checks, plots, f"Each model was trained on {steps * rows * ROW:,} tokens.")


def exponent(points: list[tuple[float, float]]) -> float:
    """The power of n with which time grows, from tokens per second at the shortest and the longest length."""
    (n, fast), *_, (m, slow) = points
    return 1 + math.log(fast / slow) / math.log(m / n)


def encode_stories(train: int, held_out: int) -> tuple[Tensor, Tensor]:
    """The ids of this many stories of each split, concatenated."""
    texts = {split: [story.text for story in islice(stories(2, split), count)]
             for split, count in (("train", train), ("held-out", held_out))}  # fmt: skip
    tokenizer = bpe(texts["train"], VOCAB)
    first, second = (torch.tensor(tokenizer.encode("\n".join(split))) for split in texts.values())
    return first, second


def draw_rows(rng: torch.Generator, ids: Tensor, rows: int, length: int = ROW) -> Batch:
    """Rows that start at random positions."""
    starts = torch.randint(len(ids) - length, (rows, 1), generator=rng)
    window = ids[starts + torch.arange(length + 1)]  # (B, length + 1)
    return whole_rows(window[:, :-1], window[:, 1:], torch.ones(rows, length))


@torch.no_grad()
def held_out_loss(model: DecoderModule, ids: Tensor, rows: int, length: int = ROW) -> float:
    loss, count, _ = next_token(model, draw_rows(generator(0), ids, rows, length))
    return (loss / count).item()


def tokens_per_second(bench: Bench, models: dict[str, DecoderModule]) -> dict[str, list[tuple[float, float]]]:
    tokens = bench.setting(4096, 256)
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for n in bench.each("speed", bench.setting((256, 1024, 4096, 16384), (64, 256))):
        batch = draw_rows(generator(0), torch.arange(tokens * 8) % VOCAB, max(1, tokens // n), n)
        for name, seconds in step_seconds(models, lambda model: next_token(model, batch)[0], 1).items():  # noqa: B023
            speeds[name].append((n, batch.tokens.numel() / seconds))
    return speeds
