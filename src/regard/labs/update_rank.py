"""What full fine-tuning changes in a weight matrix has a low rank: a few singular directions are most of the update.

All weights of a decoder that knows a language of random rules are tuned on languages in which more and more of them
differ (labs/fine_tuning.py). ΔW is the change of a linear layer's weight; it has 128 singular values. Measured: the
share of the energy ‖ΔW‖² in the largest 8 and 16 of them, the mean over all linear layers, and that of random matrices
of the same shapes; and the share of what was learned that is left when every ΔW is replaced by its nearest matrix of
rank k.

Aghajanyan et al. 2020; Hu et al. 2021.
"""

# ledger: lora.intrinsic

import statistics
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from regard.adapt.targets import adaptable_weights
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fine_tuning import HELD_OUT, Language, Tuned, mean_loss, pretrain, rows_of, tune
from regard.labs.fit import generator
from regard.models.decoder import DecoderModule

RULES, RANKS, RATE = (64, 256, 1024), (1, 2, 4, 8, 16, 32, 64, 128), 8e-4


def run(bench: Bench) -> Findings:
    language, base = pretrain(bench)
    energies, kept = {}, {}
    for rules in bench.each("languages", RULES):
        changed = language.change(rules, generator(bench.seed + 1))
        tuned = tune(base, changed, None, RATE, bench.training(200, 2), bench.seed)
        updates = [new - old for old, new in zip(linear_weights(base), linear_weights(tuned.model), strict=True)]
        name = f"{rules} new rules"
        energies[name] = energy(updates)
        ranks = bench.setting(RANKS, (8, 16))
        kept[name] = [(rank, learned_with_rank(bench, base, tuned, changed, rank)) for rank in ranks]
        bench.show(f"{name}: {energies[name][8]:.2f} of the energy in 8 directions")
    rng = generator(bench.seed)
    energies["random matrix"] = energy([torch.randn(update.shape, generator=rng) for update in updates])
    table = [
        {"ΔW": name, "energy in 8": shares[8], "energy in 16": shares[16]}
        | {f"learned with rank {rank}": dict(kept[name])[rank] if name in kept else "–" for rank in (8, 16)}
        for name, shares in energies.items()
    ]
    random, narrow, wide = (energies[name] for name in ("random matrix", *list(kept)[:: len(kept) - 1]))
    checks = [
        *(Check(f"{name}: 8 of 128 directions have more than half of the energy, 16 more than three quarters",
                f"{energies[name][8]:.2f} and {energies[name][16]:.2f}",
                energies[name][8] > 0.5 and energies[name][16] > 0.75) for name in kept),
        Check("of a random matrix they have less than half of the share",
              f"{random[8]:.2f} and {random[16]:.2f}",
              all(2 * random[k] < min(energies[name][k] for name in kept) for k in (8, 16))),
        Check("the more new rules, the smaller the share of 8 directions", f"{narrow[8]:.2f} and {wide[8]:.2f}",
              wide[8] < narrow[8]),
        *(Check(f"{name}: updates of rank 16 keep nine tenths of what was learned", f"{dict(points)[16]:.2f}",
                dict(points)[16] > 0.9) for name, points in kept.items()),
    ]  # fmt: skip
    spectra = {name: sorted(shares.items()) for name, shares in energies.items()}
    plots = [
        Plot("largest singular values", "share of the energy", spectra, "ΔW of full fine-tuning", "x"),
        Plot("rank of every ΔW", "share kept of what was learned", kept, "truncated updates", "x"),
    ]
    return Findings(table, checks, plots, "Share kept: 0 is the loss of the base model, 1 that of the whole update.")


def linear_weights(model: DecoderModule) -> list[Tensor]:
    return [weight.weight.detach() for name, weight in adaptable_weights(model).items() if name != "head"]


def energy(updates: Sequence[Tensor]) -> dict[int, float]:
    """By number of directions, the share of ‖ΔW‖² in the largest singular values, the mean over all matrices."""
    squares = [torch.linalg.svdvals(update.double()).square() for update in updates]
    return {k: statistics.fmean((values[:k].sum() / values.sum()).item() for values in squares) for k in RANKS}


@torch.no_grad()
def learned_with_rank(bench: Bench, base: DecoderModule, tuned: Tuned, language: Language, rank: int) -> float:
    """The share of the learning that is left with updates of this rank; other weights have their whole update."""
    truncated = deepcopy(tuned.model)
    for old, new in zip(linear_weights(base), linear_weights(truncated), strict=True):
        u, s, vt = torch.linalg.svd(new - old, full_matrices=False)
        new.copy_(old + (u[:, :rank] * s[:rank]) @ vt[:rank])
    held_out = rows_of(language.sequences(generator(bench.seed + 1), HELD_OUT))
    start, whole, left = (mean_loss(model, held_out) for model in (base, tuned.model, truncated))
    return (start - left) / (start - whole)
