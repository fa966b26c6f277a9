"""A model trained on short texts does not use a long context that it can run, and uses its ends better than its middle.

A decoder with RoPE reads stories of the small world in which one token is a needle, one of 16 that occur nowhere else,
and has to name it at the end. It is trained on texts of L = 64 tokens only, or with every tenth step on texts of 8L.
Both see the same number of tokens. The short one can run 8L as it is or with scaled frequencies (YaRN, NTK), without
further training. Measured by length and depth, the needle's place from the start (0) to the end (1): how often the
needle is named; and the loss of the text, for what a context is advertised by.

Kamradt 2023 (needles); Liu et al. 2023 (lost in the middle). The decoder is small and the needle easy.
"""

# ledger: long.data
# ledger: long.claims

from functools import partial

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import correct_tokens, fit, generator
from regard.labs.mamba_language import VOCAB, draw_rows, encode_stories
from regard.labs.position_models import decoder_with, rescaled
from regard.labs.tasks import whole_rows
from regard.models.decoder import DecoderModule
from regard.parts.position.rope_scaling import NTK, Yarn

NEEDLES, QUESTION, LENGTH, TIMES = 16, VOCAB + 16, 64, (1, 2, 4, 8)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORT = ("short", "short, YaRN", "short, NTK")
ALL = (*SHORT, "with long texts")


def run(bench: Bench) -> Findings:
    steps = bench.training(400, 2)
    train, held_out = encode_stories(bench.setting(2000, 40), bench.setting(200, 20))
    short = trained(bench, "short", train, steps, every=0)
    models = {"short": short, "with long texts": trained(bench, "with long texts", train, steps, every=10)}
    found: dict[tuple[str, int], list[float]] = {}
    text: dict[tuple[str, int], float] = {}
    for name in ALL:
        for n in TIMES:
            scaling = {"short, YaRN": Yarn(float(n), LENGTH), "short, NTK": NTK(float(n))}.get(name)
            model = rescaled(short, scaling) if scaling else models.get(name, short)
            found[name, n], text[name, n] = measure(bench, model, held_out, n * LENGTH)
    mean = {key: sum(shares) / len(shares) for key, shares in found.items()}
    longest = TIMES[-1]
    table = [
        {"training": name, "length": n * LENGTH, "text, nats": text[name, n]}
        | {f"depth {depth:g}": share for depth, share in zip(DEPTHS, found[name, n], strict=True)}
        for name in ALL for n in TIMES
    ]  # fmt: skip
    best = max(SHORT, key=lambda name: mean[name, longest])
    runs = min(SHORT, key=lambda name: text[name, longest])  # what would be advertised: the text is predicted best
    ends, middle = (found[runs, longest][0], found[runs, longest][-1]), found[runs, longest][2]
    used = max((n for n in TIMES if min(found[runs, n]) > 0.9), default=0) * LENGTH
    checks = [
        Check(f"trained short, the needle is named at L = {LENGTH}: above 0.9", f"{mean['short', 1]:.2f}",
              mean["short", 1] > 0.9),
        Check(f"trained short, it is named at {longest}L less often than with long texts, by 0.2 or more, whatever "
              "the scaling", f"{mean[best, longest]:.2f} and {mean['with long texts', longest]:.2f}",
              mean[best, longest] <= mean["with long texts", longest] - 0.2),
        Check(f"with long texts in every tenth step it is named at {longest}L: above 0.9",
              f"{mean['with long texts', longest]:.2f}", mean["with long texts", longest] > 0.9),
        Check(f"trained short, the context that is used (above 0.9 at every depth) is shorter than {longest}L, with "
              "the scaling whose loss of text is lowest there", f"{used} of {longest * LENGTH} tokens",
              used < longest * LENGTH),
        Check(f"there, at {longest}L, needles at the start and at the end are named more often than in the middle, "
              "by 0.1 or more", f"{ends[0]:.2f}, {middle:.2f}, {ends[1]:.2f}", min(ends) >= middle + 0.1),
    ]  # fmt: skip
    plots = [
        Plot("length", "needles named", {name: [(n * LENGTH, mean[name, n]) for n in TIMES] for name in ALL},
             "mean over depths", "x"),
        Plot("depth of the needle", "needles named", {
            name: list(zip(DEPTHS, found[name, longest], strict=True)) for name in ALL
        }, f"in {longest * LENGTH} tokens"),
    ]  # fmt: skip
    return Findings(table, checks, plots, f"Guessing: {1 / NEEDLES:.2f}. {steps} steps of {16 * LENGTH:,} tokens.")


def trained(bench: Bench, label: str, ids: Tensor, steps: int, every: int) -> DecoderModule:
    """A decoder trained on short texts; if `every` is positive, every so many steps on a long one."""
    torch.manual_seed(bench.seed)
    model = decoder_with("RoPE", QUESTION + 1, 2, LENGTH)
    count = iter(range(steps))

    def make_batch(rng: torch.Generator) -> Batch:
        long = bool(every) and next(count) % every == every - 1
        length = TIMES[-1] * LENGTH if long else LENGTH
        rows = bench.setting(16, 8) * LENGTH // length
        return hide_needles(rng, ids, rows, length, torch.rand(rows, generator=rng))

    fit(bench, label, model, make_batch, steps, 4e-3)
    return model


def hide_needles(rng: torch.Generator, ids: Tensor, rows: int, length: int, depths: Tensor) -> Batch:
    """Rows of text with a needle at these depths (B,), from 0 to 1; its name counts as much as the whole text."""
    text = draw_rows(rng, ids, rows, length)
    tokens, targets, weights = text.tokens.clone(), text.targets.clone(), torch.full((rows, length), 1 / length)
    places = (depths * (length - 2)).round().long()
    needles = torch.randint(VOCAB, VOCAB + NEEDLES, (rows,), generator=rng)
    every = torch.arange(rows)
    tokens[every, places] = needles
    weights[every, places - 1] = 0  # nobody can know that it follows; for place 0 this is the answer, set below
    tokens[:, -1], targets[:, -1], weights[:, -1] = QUESTION, needles, 1
    weights[:, -2] = 0
    return whole_rows(tokens, targets, weights)


@torch.no_grad()
def measure(bench: Bench, model: DecoderModule, ids: Tensor, length: int) -> tuple[list[float], float]:
    """The share of needles that are named at each depth, and the loss of the text in the last quarter of rows."""
    rows, rng, shares = bench.setting(48, 2), generator(10_000 + bench.seed), []
    draw = partial(hide_needles, rng, ids, rows, length)
    for depth in DEPTHS:
        shares.append(correct_tokens(model, draw(torch.full((rows,), depth)))[:, -1].float().mean().item())
    batch = draw(torch.zeros(rows))
    late = slice(-length // 4, -2)
    losses = -model(batch.tokens)[:, late].log_softmax(-1).gather(-1, batch.targets[:, late, None])
    return shares, losses.mean().item()
