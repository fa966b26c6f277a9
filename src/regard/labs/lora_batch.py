"""LoRA tolerates large batches less well than full fine-tuning, and a higher rank does not help.

A decoder that knows a language of random rules is tuned on one in which a quarter of them differ (labs/fine_tuning.py),
once over the same 1,536 sequences in batches of 8, 32 or 128, with all weights (FullFT) and with LoRA of two ranks on
all linear layers. Each has the best of four rates at each batch size; the rates of a larger batch are higher, with its
square root. Measured: by how much the loss of LoRA on held-out sequences is above FullFT's.

Schulman et al. 2025, "LoRA without regret".
"""

# ledger: lwr.batch

from regard.adapt.lora import LoRA
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fine_tuning import pretrain, tune
from regard.labs.fit import generator

NEW_RULES, SEQUENCES, BATCHES = 256, 1536, (8, 32, 128)
METHODS = {"FullFT": None, "r 32": LoRA(rank=32), "r 128": LoRA(rank=128)}
FULL_RATE, LORA_RATE, FACTORS = 4e-4, 1.6e-3, (0.5, 1, 2, 4)  # rates for a batch of 8


def run(bench: Bench) -> Findings:
    language, base = pretrain(bench)
    changed = language.change(NEW_RULES, generator(bench.seed + 1))
    sequences, factors = bench.training(SEQUENCES, 16), bench.setting(FACTORS, (1.0,))
    batches = bench.setting(BATCHES, (4, 8, 16))
    losses: dict[str, list[tuple[int, float]]] = {name: [] for name in METHODS}
    rates: dict[tuple[str, int], float] = {}
    for rows, (name, lora) in bench.each("runs", [(rows, item) for rows in batches for item in METHODS.items()]):
        scale = (rows / batches[0]) ** 0.5 * (LORA_RATE if lora else FULL_RATE)
        found = {
            scale * factor: tune(base, changed, lora, scale * factor, sequences // rows, bench.seed, rows).loss_after()
            for factor in factors
        }
        rates[name, rows] = min(found, key=lambda rate: found[rate])
        losses[name].append((rows, min(found.values())))
        bench.show(f"batches of {rows}, {name}: loss {losses[name][-1][1]:.3f}")
    gaps = {
        name: [(rows, loss - full) for (rows, loss), (_, full) in zip(points, losses["FullFT"], strict=True)]
        for name, points in losses.items()
        if name != "FullFT"
    }
    table = [
        {"method": name, "batch": rows, "steps": sequences // rows, "best rate": rates[name, rows], "loss": loss}
        for name, points in losses.items()
        for rows, loss in points
    ]
    (low, below), (high, above) = ((name, [gap for _, gap in points]) for name, points in gaps.items())
    checks = [
        *(Check(f"{name}: the gap to FullFT grows with every larger batch", ", ".join(f"{gap:.3f}" for gap in values),
                values[0] < values[1] < values[2]) for name, values in ((low, below), (high, above))),
        Check(f"batches of {batches[-1]}: the higher rank has at least half of the gap of the lower one",
              f"{high} {above[-1]:.3f}, {low} {below[-1]:.3f}", above[-1] > 0.5 * below[-1] > 0),
    ]  # fmt: skip
    plots = [
        Plot("sequences per batch", "loss", losses, "at the best rate", "x"),
        Plot("sequences per batch", "loss above FullFT's", gaps, "gap", "x"),
    ]
    return Findings(table, checks, plots, "Losses in nats per symbol. All batch sizes see the same sequences once.")
