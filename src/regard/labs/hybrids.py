"""A few layers of attention among many of Mamba recall nearly as much as all attention, at nearly Mamba's cost.

Eight layers, of which none, one in eight, one in four or all are attention and the others Mamba-2 with a small state.
Recall: up to 8 pairs of key and value, then every key again as a query for its value; all models are trained on the
same sequences. Cost: tokens per second of training at a length at which attention is expensive. If attention is the
first layer, a short convolution precedes it, so that it has access to the previous token as Mamba does. Attention has
no positions, as in Jamba.

Lieber et al. 2024 (Jamba, one in eight); Waleffe et al. 2024.
"""

# ledger: ssm.hybrid

import torch

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator, step_seconds
from regard.labs.small_models import mixer_block
from regard.labs.tasks import FIRST, associative_recall, draw_symbols, whole_rows
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.ssm.mamba2 import Mamba2

DEPTH, WIDTH, SYMBOLS = 8, 64, 16
PATTERNS = {  # the layers that are attention: in the middle of each group, as in Jamba
    "none": (),
    "1 in 8": (4,),
    "1 in 4": (2, 6),
    "all": tuple(range(DEPTH)),
}


def run(bench: Bench) -> Findings:
    steps, pairs, length = bench.training(400, 1), bench.setting((2, 4, 8), (2, 4)), bench.setting(8192, 64)
    models, recall = {}, {}
    for name, attention_layers in PATTERNS.items():
        torch.manual_seed(bench.seed)
        models[name] = hybrid(attention_layers)
        recall[name] = train(bench, name, models[name], steps, pairs)
    symbols = draw_symbols(generator(bench.seed), SYMBOLS, 1, length)
    batch = whole_rows(symbols, symbols, torch.ones_like(symbols))
    times = step_seconds(models, lambda model: next_token(model, batch)[0], 1)
    speeds = {name: length / seconds for name, seconds in times.items()}
    at_max_pairs = {name: points[-1][1] for name, points in recall.items()}
    table = [
        {"attention": name} | {f"{n} pairs": share for n, share in recall[name]} | {"tokens/s": speeds[name]}
        for name in PATTERNS
    ]
    few, observed = ("1 in 8", "1 in 4"), ", ".join(f"{name} {share:.2f}" for name, share in at_max_pairs.items())
    checks = [
        Check(f"without attention fewer of {pairs[-1]} pairs are recalled than with all attention", observed,
              at_max_pairs["none"] < at_max_pairs["all"] - 0.1),
        *(Check(f"{name} recalls as much as all attention, within 0.05",
                f"{at_max_pairs[name]:.2f} and {at_max_pairs['all']:.2f}",
                at_max_pairs[name] > at_max_pairs["all"] - 0.05) for name in few),
        Check(f"at {length:,} tokens 1 in 8 trains at more than three quarters of the speed of none",
              f"{speeds['1 in 8']:,.0f} of {speeds['none']:,.0f} tokens/s", speeds["1 in 8"] > 0.75 * speeds["none"]),
        Check("1 in 8 and 1 in 4 train faster than all attention",
              f"all: {speeds['all']:,.0f}, 1 in 4: {speeds['1 in 4']:,.0f}",
              min(speeds[name] for name in few) > speeds["all"]),
    ]  # fmt: skip
    plots = [
        Plot("pairs", "accuracy", recall, "values recalled, by share of attention", "x"),
        Plot("layers of attention", "tokens per second", {"": list(enumerate(speeds.values()))},
             f"training at {length:,} tokens", groups=tuple(speeds)),
    ]  # fmt: skip
    return Findings(table, checks, plots, f"Guessing: {2 / SYMBOLS:.2f}. At most {steps} steps each.")


def hybrid(attention_layers: tuple[int, ...]) -> DecoderModule:
    """Attention in these layers, Mamba-2 in the others."""
    mixers = [Attention(2) if i in attention_layers else Mamba2(state=4, head_dim=32, expand=1) for i in range(DEPTH)]
    blocks = [mixer_block(mixer, WIDTH, i == 0 and i in attention_layers) for i, mixer in enumerate(mixers)]
    return Decoder(FIRST + SYMBOLS, WIDTH, tuple(Repeat((block,)) for block in blocks)).build()


def train(
    bench: Bench, name: str, model: DecoderModule, steps: int, pairs: tuple[int, ...]
) -> list[tuple[float, float]]:
    """The accuracy for each number of pairs, after training on all of them."""

    def batch(rng: torch.Generator, pairs: int, tokens: int) -> Batch:
        return associative_recall(rng, pairs, tokens // (4 * pairs), SYMBOLS)

    def mixed(rng: torch.Generator) -> Batch:
        return batch(rng, pairs[int(torch.randint(len(pairs), (), generator=rng))], 1024)

    fit(bench, f"attention: {name}", model, mixed, steps, 5e-3, stop_below=0.05)
    test = generator(bench.seed + 1)
    return [(n, accuracy(model, batch(test, n, bench.setting(4096, 64)))) for n in pairs]
