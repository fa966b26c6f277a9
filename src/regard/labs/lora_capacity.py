"""A low rank learns as well as full fine-tuning while the data fits its capacity; beyond it, it learns more slowly.

A decoder that knows a language of random rules is tuned on languages in which more and more of them differ
(labs/fine_tuning.py): a new rule is about 5 bits of information. LoRA has ranks 1 to 128 on all linear layers, FullFT
trains all weights, each at the better of two rates. Measured: the loss on held-out sequences over the steps, and the
share learned, of the loss that could be removed. The rank changes the time of a forward only while the adapter is not
merged: this time is measured with a wider model, with all ranks alternating.

Hu et al. 2021; Schulman et al. 2025, "LoRA without regret".
"""

# ledger: lwr.capacity lora.ranks

import math
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from regard.adapt.adapters import add_lora, merge_lora
from regard.adapt.lora import LoRA
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fine_tuning import SYMBOLS, Tuned, pretrain, tune
from regard.labs.fit import generator
from regard.labs.small_models import small_decoder

FULL = "FullFT"
RULES, RANKS = (64, 256, 1024), (1, 4, 16, 128)
LORA_RATES, FULL_RATES = (8e-4, 2.4e-3), (4e-4, 1.2e-3)
BITS = math.log2(SYMBOLS)  # per rule
LEFT = 0.05  # a rank has left the common curve at this share of the loss above the highest rank's


def run(bench: Bench) -> Findings:
    ranks = bench.setting(RANKS, RANKS[:2])
    methods: dict[str, LoRA | None] = {FULL: None} | {f"r {rank}": LoRA(rank=rank) for rank in ranks}
    tuned = measure(bench, methods)
    times = {merged: forward_times(bench, methods, merged == "merged") for merged in ("not merged", "merged")}
    table = [
        {"method": name, "trained weights": trained_weights(tuned[RULES[0]][name])}
        | {f"learned of {rules} rules": tuned[rules][name].learned for rules in RULES}
        | {f"ms, {merged}": milliseconds[name] for merged, milliseconds in times.items()}
        for name in methods
    ]
    curves = {name: run.curve for name, run in tuned[RULES[-1]].items()}
    learned = {name: [(rules * BITS, tuned[rules][name].learned) for rules in RULES] for name in methods}
    bars = {merged: list(enumerate(milliseconds.values())) for merged, milliseconds in times.items()}
    plots = [
        Plot("step", "loss", curves, f"{RULES[-1]:,} new rules"),
        Plot("bits of new rules", "share learned", learned, f"after {bench.training(200, 2)} steps", "x"),
        Plot("", "ms", bars, "time of a forward", groups=tuple(methods)),
    ]
    remark = "Share learned: of the loss between that of the base model and that of a model that knows all rules."
    return Findings(table, [*capacity_checks(tuned, list(methods)), *time_checks(times)], plots, remark)


def measure(bench: Bench, methods: Mapping[str, LoRA | None]) -> dict[int, dict[str, Tuned]]:
    """By number of new rules and method, the better of the runs at two rates."""
    language, base = pretrain(bench)
    steps = bench.training(200, 2)
    found: dict[int, dict[str, Tuned]] = {rules: {} for rules in RULES}
    for rules, (method, lora) in bench.each("runs", [(n, item) for n in RULES for item in methods.items()]):
        changed = language.change(rules, generator(bench.seed + 1))
        rates = bench.setting(LORA_RATES if lora else FULL_RATES, (1e-3,))
        runs = [tune(base, changed, lora, rate, steps, bench.seed) for rate in rates]
        found[rules][method] = min(runs, key=Tuned.loss_after)
        bench.show(f"{rules} rules, {method}: learned {found[rules][method].learned:.3f}")
    return found


def trained_weights(run: Tuned) -> int:
    return sum(p.numel() for p in run.model.parameters() if p.requires_grad)


def capacity_checks(tuned: Mapping[int, Mapping[str, Tuned]], names: Sequence[str]) -> list[Check]:
    few, many = RULES[0], RULES[-1]
    full, low, high = names[0], names[1], names[-1]
    learned = {rules: {name: run.learned for name, run in runs.items()} for rules, runs in tuned.items()}
    behind = [learned[rules][full] - learned[rules][low] for rules in RULES]
    by_rank = [learned[many][name] for name in names[1:]]
    curve = tuned[many][low].curve
    middle, end = curve[len(curve) // 2][1], tuned[many][low].loss_after()
    left = [departure(tuned[many][name], tuned[many][high]) for name in names[1:-1]]
    return [
        Check(f"{few} new rules: every rank learns as much as FullFT, within 0.05",
              ", ".join(f"{name} {learned[few][name]:.2f}" for name in names),
              min(learned[few][name] for name in names[1:]) > learned[few][full] - 0.05),
        Check(f"{many:,} new rules: the highest rank learns as much as FullFT, within 0.05",
              f"{learned[many][high]:.2f} and {learned[many][full]:.2f}",
              learned[many][high] > learned[many][full] - 0.05),
        Check(f"{many:,} new rules: more is learned with every higher rank", ", ".join(f"{x:.2f}" for x in by_rank),
              all(lower < higher for lower, higher in zip(by_rank, by_rank[1:], strict=False))),
        Check("the more new rules, the more rank 1 is behind FullFT", ", ".join(f"{x:.2f}" for x in behind),
              behind[0] < behind[1] < behind[2]),
        Check(f"{many:,} new rules: rank 1 has no floor, its loss falls by 2 % or more in the second half",
              f"{middle:.3f} to {end:.3f}", end < 0.98 * middle),
        Check(f"{many:,} new rules: the lower the rank, the earlier it leaves the curve of the highest",
              f"after {', '.join(f'{step:.0f}' for step in left)} steps",
              left == sorted(left) and left[0] < left[-1]),
    ]  # fmt: skip


def departure(run: Tuned, reference: Tuned) -> float:
    """The step from which the loss stays above the reference's; the last one if it does not."""
    pairs = list(zip(run.curve, reference.curve, strict=True))
    together = [step for (step, loss), (_, other) in pairs if loss < (1 + LEFT) * other]
    return together[-1] if together else 0.0


def forward_times(bench: Bench, methods: Mapping[str, LoRA | None], merged: bool) -> dict[str, float]:
    """Median milliseconds of a forward of 32 tokens. FullFT is the base model, which has no adapter."""
    models = {}
    for name, lora in methods.items():
        torch.manual_seed(bench.seed)
        models[name] = small_decoder("attention", SYMBOLS, bench.setting(512, 64)).eval()
        if lora is not None:
            add_lora(models[name], lora, bench.seed)
            if merged:
                merge_lora(models[name])
    tokens = torch.randint(SYMBOLS, (1, 32), generator=generator(bench.seed))
    milliseconds: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for _ in range(bench.setting(100, 2)):
            for name, model in models.items():
                start = time.perf_counter()
                model(tokens)
                milliseconds[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in milliseconds.items()}


def time_checks(times: Mapping[str, Mapping[str, float]]) -> list[Check]:
    apart, merged = times["not merged"], times["merged"]
    (_, low, *_, high) = apart
    slowest = max(merged.values()) / merged[FULL]
    return [
        Check("not merged, the highest rank takes longer than rank 1, by a tenth or more",
              f"{apart[high] / apart[low]:.2f}x", apart[high] > 1.1 * apart[low]),
        Check("merged, no rank takes longer than the base model, within a tenth", f"at most {slowest:.2f}x",
              slowest < 1.1),
    ]  # fmt: skip
