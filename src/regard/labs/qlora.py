"""QLoRA: adapters on a base of four bits learn as much as adapters on the full weights.

A decoder that knows a language of random rules is tuned on one in which a quarter of them differ (labs/fine_tuning.py),
with adapters of rank 8 in all linear layers. The linear layers of the base are kept as they are, or stored in NF4, or
as integers of 4, 3 and 2 bits with a scale for 32 weights. Each has the better of two learning rates. Measured: the
loss on held-out sequences, before tuning of the language that the base knows, and after 200 steps of the changed one.

Dettmers et al. 2023 (QLoRA).
"""

# ledger: lora.qlora

from copy import deepcopy

from regard.adapt.adapters import add_lora
from regard.adapt.lora import LoRA
from regard.adapt.quantized import QuantizedLinear
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fine_tuning import HELD_OUT, Language, Tuned, mean_loss, pretrain, rows_of, tune
from regard.labs.fit import generator
from regard.models.decoder import DecoderModule

NEW_RULES, RATES = 256, (1.6e-3, 3.2e-3)
FLOAT, NORMAL = "float32", "NF4"
BASES = {FLOAT: None, NORMAL: NF4()} | {f"{bits} bits": Integer(bits, group=32) for bits in (4, 3, 2)}


def run(bench: Bench) -> Findings:
    language, model = pretrain(bench)
    changed, steps = language.change(NEW_RULES, generator(bench.seed + 1)), bench.training(200, 2)
    rates = bench.setting(RATES, RATES[:1])
    before, after, sizes = {}, {}, {}
    for name, format in bench.each("bases", BASES.items()):
        lora = LoRA(rank=8, base=format)
        before[name], sizes[name] = start_of(model, lora, language, bench.seed)
        runs = [tune(model, changed, lora, rate, steps, bench.seed) for rate in rates]
        after[name] = min(runs, key=Tuned.loss_after)
        bench.show(f"{name}: {before[name]:.3f} before, {after[name].loss_after():.3f} after")
    losses = {name: tuned.loss_after() for name, tuned in after.items()}
    ratio = {name: loss / losses[FLOAT] for name, loss in losses.items()}
    harm = {name: loss - before[FLOAT] for name, loss in before.items()}
    gap = {name: loss - losses[FLOAT] for name, loss in losses.items()}
    table = [
        {"base": name, "bits per weight": sizes[name], "loss before": before[name], "loss after": losses[name],
         "of LoRA's": ratio[name], "share learned": after[name].learned}
        for name in BASES
    ]  # fmt: skip
    checks = [
        Check("after tuning, the loss with NF4 is at most 2 % above that with the full weights",
              f"{losses[NORMAL]:.3f} and {losses[FLOAT]:.3f}", ratio[NORMAL] <= 1.02),
        Check("the same with integers of 4 bits", f"{losses['4 bits']:.3f}", ratio["4 bits"] <= 1.02),
        Check("with 2 bits it is more than 2 % above", f"{losses['2 bits']:.3f}", ratio["2 bits"] > 1.02),
        Check("NF4 harms the base less than integers of 4 bits, before tuning, in nats",
              f"{harm[NORMAL]:.4f} and {harm['4 bits']:.4f}", harm[NORMAL] < harm["4 bits"]),
        Check("tuning repairs most of the harm of 3 bits", f"{harm['3 bits']:.3f} before, {gap['3 bits']:.3f} after",
              gap["3 bits"] < harm["3 bits"] / 2),
    ]  # fmt: skip
    plots = [
        Plot("step", "loss", {name: tuned.curve for name, tuned in after.items()}, "at the better rate"),
        Plot("", "nats above the full weights", {
            "before tuning": list(enumerate(harm.values())), "after": list(enumerate(gap.values())),
        }, groups=tuple(BASES)),
    ]  # fmt: skip
    return Findings(table, checks, plots, "Embeddings and the output layer keep their weights in float32.")


def start_of(model: DecoderModule, lora: LoRA, language: Language, seed: int) -> tuple[float, float]:
    """The loss of the base on the language that it knows, and the bits per weight of its linear layers."""
    base = deepcopy(model)
    add_lora(base, lora)
    loss = mean_loss(base, rows_of(language.sequences(generator(seed + 2), HELD_OUT)))
    layers = [module for module in base.modules() if isinstance(module, QuantizedLinear)]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    stored = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
    return loss, 8 * stored / weights if layers else 32.0
