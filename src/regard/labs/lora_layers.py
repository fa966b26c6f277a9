"""LoRA should adapt all layers, above all the MLPs: attention alone lags at equal size and adds nothing to the MLPs.

A decoder that knows a language of random rules is tuned on one in which all of them differ (labs/fine_tuning.py), with
adapters of the same number of weights on the projections of attention (rank 9), on the MLPs (rank 8), or on both (rank
4), and with rank 8 on both, which is the MLPs' adapter and attention's in addition. Each has the best of four rates.
Measured: the loss on held-out sequences after 200 steps.

Schulman et al. 2025, "LoRA without regret".
"""

# ledger: lwr.layers

from regard.adapt.lora import LoRA
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fine_tuning import Tuned, pretrain, tune
from regard.labs.fit import generator
from regard.planning.training import ATTENTION, FEEDFORWARD

NEW_RULES, RATES = 1024, (8e-4, 1.6e-3, 3.2e-3, 6.4e-3)
ADAPTERS = {
    "attention, r 9": LoRA(rank=9, targets=ATTENTION),
    "MLP, r 8": LoRA(rank=8, targets=FEEDFORWARD),
    "both, r 4": LoRA(rank=4),
    "both, r 8": LoRA(rank=8),
}


def run(bench: Bench) -> Findings:
    language, base = pretrain(bench)
    changed, steps = language.change(NEW_RULES, generator(bench.seed + 1)), bench.training(200, 2)
    rates, best, u_curves = bench.setting(RATES, RATES[:2]), {}, {}
    for name, lora in bench.each("adapters", ADAPTERS.items()):
        runs = {rate: tune(base, changed, lora, rate, steps, bench.seed) for rate in rates}
        u_curves[name] = [(rate, run.loss_after()) for rate, run in runs.items()]
        best[name] = min(runs.values(), key=Tuned.loss_after)
        bench.show(f"{name}: learned {best[name].learned:.3f}")
    learned = {name: run.learned for name, run in best.items()}
    table = [
        {"adapter": name, "weights": sum(p.numel() for p in run.model.parameters() if p.requires_grad)}
        | {"loss": run.loss_after(), "share learned": learned[name]}
        for name, run in best.items()
    ]
    attention, mlp, matched, more = ADAPTERS
    checks = [
        Check("at equal size attention alone learns less than the MLPs, by 0.05 or more",
              f"{learned[attention]:.2f} and {learned[mlp]:.2f}", learned[attention] < learned[mlp] - 0.05),
        Check("at equal size attention alone learns less than both, by 0.05 or more",
              f"{learned[attention]:.2f} and {learned[matched]:.2f}", learned[attention] < learned[matched] - 0.05),
        Check("at equal size both learn no more than the MLPs, within 0.02",
              f"{learned[matched]:.3f} and {learned[mlp]:.3f}", learned[matched] < learned[mlp] + 0.02),
        Check("at equal rank attention in addition to the MLPs adds nothing, within 0.02",
              f"{learned[more]:.3f} and {learned[mlp]:.3f}", abs(learned[more] - learned[mlp]) < 0.02),
    ]  # fmt: skip
    plots = [
        Plot("step", "loss", {name: run.curve for name, run in best.items()}, "at the best rate"),
        Plot("learning rate", "loss", u_curves, f"after {steps} steps", "x"),
    ]
    remark = "Share learned: of the loss between that of the base model and that of a model that knows all rules."
    return Findings(table, checks, plots, remark)
