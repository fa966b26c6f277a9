"""Scaled RoPE takes a model to 8, 16 and 32 times its training length with little or no further training.

A decoder with RoPE is trained on stories in rows of L = 32 tokens. Its frequencies are then scaled for 8L, 16L and 32L,
by position interpolation (PI) or YaRN, or left as they are. Each of these is evaluated at that length as it is, and
after 30 steps on rows of it, a tenth of the steps of the training. All predict the same tokens: the last half L of
held-out rows of 32L. Whether the far context is used is the subject of another lab (short-training); here a loss as low
as at L only says that it does no harm.

"Share lost" is (loss - loss at L) / (loss of guessing by frequency - loss at L). Chen et al. 2023; Peng et al. 2023.
"""

# ledger: pos.rope.reach

import copy
from functools import partial

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.extrapolation import guess_by_frequency
from regard.labs.fit import fit, generator
from regard.labs.mamba_language import VOCAB, draw_rows, encode_stories
from regard.labs.position_models import decoder_with, rescaled
from regard.models.decoder import DecoderModule
from regard.parts.position.rope_scaling import LinearScaling, Scaling, Yarn

FACTORS, WAYS = (8, 16, 32), ("plain", "PI", "YaRN")


def run(bench: Bench) -> Findings:
    steps, tuning, length = bench.training(300, 2), bench.training(30, 1), 32
    train, held_out = encode_stories(bench.setting(3000, 40), bench.setting(200, 20))
    torch.manual_seed(bench.seed)
    model = decoder_with("RoPE", VOCAB, 3, length)
    fit(bench, "training", model, lambda rng: draw_rows(rng, train, 32, length), steps, 4e-3)
    short = late_loss(bench, model, held_out, length, 1)
    guess = guess_by_frequency(train, held_out)
    lost: dict[tuple[str, int], tuple[float, float]] = {}  # as it is, tuned
    for factor in FACTORS:
        for way in WAYS:
            scaled = rescaled(copy.deepcopy(model), scaling_of(way, factor, length))
            before = late_loss(bench, scaled, held_out, length, factor)
            rows = max(1, 2048 // (factor * length))
            make_batch = partial(draw_rows, ids=train, rows=rows, length=factor * length)
            fit(bench, f"{way}, {factor}L", scaled, make_batch, tuning, 1e-3)
            after = late_loss(bench, scaled, held_out, length, factor)
            lost[way, factor] = ((before - short) / (guess - short), (after - short) / (guess - short))
    table = [
        {"frequencies": way, "length": factor * length, "share lost": values[0], "share lost, tuned": values[1]}
        for (way, factor), values in lost.items()
    ]
    observed = {way: [", ".join(f"{lost[way, n][tuned]:.2f}" for n in FACTORS) for tuned in (0, 1)] for way in WAYS}
    checks = [
        Check("without further training YaRN loses less than a tenth at 8L", f"{lost['YaRN', 8][0]:.2f}",
              lost["YaRN", 8][0] < 0.1),
        *(Check(f"after {tuning} steps {way} loses less than a twentieth at 8L, 16L and 32L", observed[way][1],
                all(lost[way, n][1] < 0.05 for n in FACTORS)) for way in WAYS[1:]),
        Check(f"after {tuning} steps plain frequencies lose more than PI and YaRN at 8L, 16L and 32L",
              "; ".join(f"{way} {values[1]}" for way, values in observed.items()),
              all(lost["plain", n][1] > max(lost["PI", n][1], lost["YaRN", n][1]) for n in FACTORS)),
    ]  # fmt: skip
    plots = [
        Plot("length", "share lost", {way: [(n * length, lost[way, n][tuned]) for n in FACTORS] for way in WAYS}, title,
             "x") for tuned, title in enumerate(("no further training", f"after {tuning} steps"))
    ]  # fmt: skip
    return Findings(table, checks, plots, f"Trained for {steps} steps of {32 * length:,} tokens; tuned on 2,048 each.")


def scaling_of(way: str, factor: int, length: int) -> Scaling | None:
    return {"plain": None, "PI": LinearScaling(float(factor)), "YaRN": Yarn(float(factor), length)}[way]


@torch.no_grad()
def late_loss(bench: Bench, model: DecoderModule, ids: Tensor, length: int, factor: int) -> float:
    """The loss of the last length/2 tokens of the same rows after a context of factor · length tokens."""
    batch = draw_rows(generator(0), ids, bench.setting(32, 2), FACTORS[-1] * length)
    late = batch.targets[:, -length // 2 :, None]
    logits = model(batch.tokens[:, -factor * length :])[:, -length // 2 :]
    return -logits.log_softmax(-1).gather(-1, late).mean().item()
