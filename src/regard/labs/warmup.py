"""Post-norm needs a warmup of the learning rate; pre-norm trains without it.

Stacks of six thin layers (see deep-stacks) with pre-norm or post-norm are trained on characters of stories by AdamW, at
three learning rates, with a warmup over a fifth of the steps or with none; the rate then decays alike. As in
deep-stacks, a stack counts as trained if its loss on held-out stories is below the entropy of the frequencies of
characters by 0.3 nats.

Xiong et al. 2020, who found that post-norm without warmup does not train, or badly.
"""

# ledger: blk.warmup

import math

import torch
from torch import Tensor

from regard.labs.deep_stacks import LENGTH, ROWS, entropy_of, thin_stack
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator
from regard.labs.gru_or_lstm import encode_stories, mean_loss, smooth
from regard.labs.mamba_language import draw_rows
from regard.models.decoder import DecoderModule
from regard.objectives.next_token import next_token
from regard.training.faults import NonFinite
from regard.training.step import take_step

DEPTH, WARMUP = 6, 0.2  # of 12 layers post-norm trains at none of these rates, with warmup or without
RATES = (1e-3, 3e-3, 1e-2)


def run(bench: Bench) -> Findings:
    steps, depth = bench.training(150, 2), bench.setting(DEPTH, 2)
    train, held_out = (encode_stories(split, bench.setting(1000, 10)) for split in ("train", "held-out"))
    test = draw_rows(generator(0), held_out, bench.setting(128, 4), LENGTH)
    frequencies = entropy_of(test.targets)
    losses, curves = {}, {}
    for style in ("pre-norm", "post-norm"):
        for warmup in (True, False):
            for rate in RATES:
                model, label = thin_stack(style, depth, bench.seed), f"{style}, {'' if warmup else 'no '}warmup"
                history = train_with(bench, f"{label}, rate {rate:g}", model, train, steps, rate, warmup)
                losses[style, warmup, rate] = mean_loss(model, test)
                if rate == RATES[-1]:
                    curves[label] = smooth(history, 10)
    best = {key: min(losses[*key, rate] for rate in RATES) for key in dict.fromkeys(key[:2] for key in losses)}

    def learned(style: str, warmup: bool) -> float:
        return frequencies - best[style, warmup]

    checks = [
        Check("pre-norm trains without warmup, at the better rate",
              f"{learned('pre-norm', False):.2f} nats below the frequencies", learned("pre-norm", False) > 0.3),
        Check("and its loss is the same as with warmup, within 0.1", f"{best['pre-norm', False]:.2f} and "
              f"{best['pre-norm', True]:.2f}", abs(best["pre-norm", False] - best["pre-norm", True]) < 0.1),
        Check("post-norm trains with warmup, at the better rate",
              f"{learned('post-norm', True):.2f} nats below the frequencies", learned("post-norm", True) > 0.3),
        Check("without warmup it does not, or its loss is higher by 0.1 or more, at the better rate",
              f"{best['post-norm', False]:.2f} and {best['post-norm', True]:.2f}",
              best["post-norm", False] >= best["post-norm", True] + 0.1),
        Check(f"at the rate {RATES[-1]:g} post-norm gains more from warmup than pre-norm",
              " and ".join(f"{losses[style, False, RATES[-1]] - losses[style, True, RATES[-1]]:+.2f}"
                           for style in ("post-norm", "pre-norm")),
              losses["post-norm", False, RATES[-1]] - losses["post-norm", True, RATES[-1]]
              > losses["pre-norm", False, RATES[-1]] - losses["pre-norm", True, RATES[-1]]),
    ]  # fmt: skip
    table = [{"stack": style, "warmup": "yes" if warmup else "no", "learning rate": f"{rate:g}", "held-out loss": loss}
             for (style, warmup, rate), loss in losses.items()]  # fmt: skip
    names = {(style, warmup): f"{style}, {'' if warmup else 'no '}warmup" for style, warmup in best}
    lines = {name: [(rate, losses[*key, rate]) for rate in RATES] for key, name in names.items()}
    plots = [
        Plot("learning rate", "nats per character", lines, "held-out stories", "x"),
        Plot("step", "nats per character", curves, f"training, rate {RATES[-1]:g}"),
    ]
    return Findings(
        table, checks, plots, f"{depth} layers, {steps} steps; entropy of the frequencies: {frequencies:.2f}."
    )


def train_with(
    bench: Bench, label: str, model: DecoderModule, ids: Tensor, steps: int, rate: float, warmup: bool
) -> list[float]:
    """The loss of every step; training ends where the loss or its gradient is not finite."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng, losses = generator(bench.seed), []
    model.train()
    for step in bench.each(label, range(steps)):
        rising = min(1.0, (step + 1) / (WARMUP * steps)) if warmup else 1.0
        optimizer.param_groups[0]["lr"] = rate * rising * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        try:
            losses.append(take_step(model, next_token, draw_rows(rng, ids, ROWS, LENGTH), optimizer, 1.0)["loss"])
        except NonFinite:
            break
    model.eval()
    return losses
