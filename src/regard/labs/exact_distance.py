"""A distance learned at the start of a text holds deep inside it if positions are relative; ALiBi is the less exact.

A row has random symbols, and the target of every token is the token at a fixed distance before it. Decoders that differ
in the position scheme only are trained on rows of 32 tokens and tested in two ways: on rows of 32 whose positions are
moved by up to 224, and on rows of 256, deep inside which the relation is the same. The first changes the index alone,
the second also the number of keys. RoPE and ALiBi are trained with a larger distance too: ALiBi's penalty grows evenly
with the distance, so that one of many distances is hard to single out, while a rotation can have its maximum anywhere.

Su et al. 2021; Press et al. 2021; Shaw et al. 2018.
"""

# ledger: pos.relative
# ledger: pos.alibi.exact

from functools import partial

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import correct_tokens, fit, generator
from regard.labs.position_models import ABSOLUTE, SCHEMES, decoder_with
from regard.labs.tasks import FIRST, draw_symbols, whole_rows

SYMBOLS, NEAR, FAR = 16, 4, 16  # NEAR and FAR: distances of the target
LENGTH, TIMES = 32, (1, 2, 4, 8)
RELATIVE = ("RoPE", "ALiBi", "T5")
Depths = list[tuple[float, float]]  # (last position, accuracy)


def run(bench: Bench) -> Findings:
    steps = bench.training(250, 2)
    trained = [(scheme, NEAR) for scheme in SCHEMES] + [("RoPE", FAR), ("ALiBi", FAR)]
    moved, inside = {}, {}
    for scheme, distance in trained:
        moved[scheme, distance], inside[scheme, distance] = train(bench, scheme, distance, steps)
    start = {key: depths[0][1] for key, depths in moved.items()}
    last = TIMES[-1] * LENGTH
    table = [
        {"positions": scheme, "distance": distance, "test": test} | {f"to {end:g}": share for end, share in depths}
        for scheme, distance in trained
        for test, depths in (("moved", moved[scheme, distance]), ("inside", inside[scheme, distance]))
    ]
    checks = [
        Check(f"{scheme} learns a distance of {NEAR} at positions below {LENGTH}: an accuracy above 0.9",
              f"{start[scheme, NEAR]:.2f}", start[scheme, NEAR] > 0.9) for scheme in (*ABSOLUTE, *RELATIVE)
    ]  # fmt: skip
    for where, tested in (("with positions moved", moved), (f"inside rows of {last} tokens", inside)):
        deep = {scheme: tested[scheme, NEAR][-1][1] for scheme in SCHEMES}
        checks += [
            *(Check(f"{where} up to {last}, {scheme} is as accurate as at the start, within 0.1",
                    f"{deep[scheme]:.2f} and {start[scheme, NEAR]:.2f}", deep[scheme] >= start[scheme, NEAR] - 0.1)
              for scheme in RELATIVE),
            *(Check(f"{where} up to {last}, {scheme} loses more than half of its accuracy",
                    f"{deep[scheme]:.2f} and {start[scheme, NEAR]:.2f}", deep[scheme] < start[scheme, NEAR] / 2)
              for scheme in ABSOLUTE),
        ]  # fmt: skip
    checks += [
        Check(f"at a distance of {distance}, ALiBi is less accurate than RoPE at the start",
              f"{start['ALiBi', distance]:.3f} and {start['RoPE', distance]:.3f}",
              start["ALiBi", distance] < start["RoPE", distance]) for distance in (NEAR, FAR)
    ]  # fmt: skip
    pair = {scheme: [(i, start[scheme, distance]) for i, distance in enumerate((NEAR, FAR))]
            for scheme in ("RoPE", "ALiBi")}  # fmt: skip
    plots = [
        *(Plot("position", "accuracy", {scheme: tested[scheme, NEAR] for scheme in SCHEMES}, title, "x")
          for title, tested in (("positions moved", moved), ("inside longer rows", inside))),
        Plot("distance of the target", "accuracy", pair, "at the start", groups=(str(NEAR), str(FAR))),
    ]  # fmt: skip
    remark = f"Guessing: {1 / SYMBOLS:.2f}. {steps} steps of 32 rows. No positions (none) is shown and not judged."
    return Findings(table, checks, plots, remark)


def train(bench: Bench, scheme: str, distance: int, steps: int) -> tuple[Depths, Depths]:
    """The accuracy by depth, of short rows whose positions are moved and inside long rows."""
    torch.manual_seed(bench.seed)
    model = decoder_with(scheme, FIRST + SYMBOLS, 2, LENGTH, TIMES[-1] * LENGTH)
    make_batch = partial(earlier_tokens, distance=distance, length=LENGTH)
    fit(bench, f"{scheme}, distance {distance}", model, make_batch, steps, 4e-3, stop_below=0.01)
    rng, rows = generator(10_000 + bench.seed), bench.setting(64, 2)
    moved = []
    for times in TIMES:
        short = earlier_tokens(rng, distance, LENGTH, rows)
        shifted = Batch(**{**short, "positions": short.positions + (times - 1) * LENGTH})
        moved.append((float(times * LENGTH), correct_tokens(model, shifted)[:, distance:].float().mean().item()))
    long = correct_tokens(model, earlier_tokens(rng, distance, TIMES[-1] * LENGTH, rows)).float()
    ends = [times * LENGTH for times in TIMES]
    return moved, [(float(end), long[:, max(distance, end - LENGTH) : end].mean().item()) for end in ends]


def earlier_tokens(rng: torch.Generator, distance: int, length: int, rows: int = 32) -> Batch:
    """Random symbols; the target of each token is the token `distance` positions before it."""
    tokens = draw_symbols(rng, SYMBOLS, rows, length)
    weights = (torch.arange(length) >= distance).expand(rows, length)
    return whole_rows(tokens, tokens.roll(distance, 1), weights)
