"""A few layers of attention among many of Mamba recall nearly as much as all attention, at nearly Mamba's cost.

Eight layers: none, one in eight, one in four, or all of them attention, the others Mamba-2 with a small state. Recall:
key and value, up to 8 times, then every key is asked for its value; all train on the same texts. Cost: tokens a second
of training at a length where attention is dear. Where attention is the first layer a short convolution stands before
it, so that it knows neighbours as Mamba does. Attention has no positions, as in Jamba.

Lieber et al. 2024 (Jamba, one in eight); Waleffe et al. 2024.
"""

# ledger: ssm.hybrid

import torch

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.labs.contenders import block
from regard.labs.findings import Check, Findings, Plot
from regard.labs.fit import accuracy, fit, generator, interleaved
from regard.labs.tasks import FIRST, associative_recall, draw, texts
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.ssm.mamba2 import Mamba2

DEPTH, WIDTH, SYMBOLS = 8, 64, 16
PATTERNS = {  # which layers are attention: in the middle of each run, as in Jamba
    "none": (),
    "1 in 8": (4,),
    "1 in 4": (2, 6),
    "all": tuple(range(DEPTH)),
}


def run(bench: Bench) -> Findings:
    steps, pairs, n = bench.pick(400, 1), bench.pick((2, 4, 8), (2, 4)), bench.pick(8192, 64)
    models, recall = {}, {}
    for name, places in PATTERNS.items():
        torch.manual_seed(bench.seed)
        models[name] = hybrid(places)
        recall[name] = recalled(bench, name, models[name], steps, pairs)
    read = draw(generator(bench.seed), SYMBOLS, 1, n)
    text = texts(read, read, torch.ones_like(read))
    times = interleaved(models, lambda model: next_token(model, text)[0], 1)
    speeds = {name: n / seconds for name, seconds in times.items()}
    most = {name: points[-1][1] for name, points in recall.items()}
    table = [
        {"attention": name} | {f"{k} pairs": right for k, right in recall[name]} | {"tokens/s": speeds[name]}
        for name in PATTERNS
    ]
    few, told = ("1 in 8", "1 in 4"), ", ".join(f"{name} {right:.2f}" for name, right in most.items())
    checks = [
        Check(f"without attention fewer of {pairs[-1]} pairs are recalled than with all", told,
              most["none"] < most["all"] - 0.1),
        *(Check(f"{name} recalls as much as all, within 0.05", f"{most[name]:.2f} and {most['all']:.2f}",
                most[name] > most["all"] - 0.05) for name in few),
        Check(f"at {n:,} tokens 1 in 8 keeps three quarters of the speed without", f"{speeds['1 in 8']:,.0f} of "
              f"{speeds['none']:,.0f} tokens/s", speeds["1 in 8"] > 0.75 * speeds["none"]),
        Check("both are faster than all attention", f"all: {speeds['all']:,.0f}, 1 in 4: {speeds['1 in 4']:,.0f}",
              min(speeds[name] for name in few) > speeds["all"]),
    ]  # fmt: skip
    plots = [
        Plot("pairs", "accuracy", recall, "values recalled, by share of attention", "x"),
        Plot("layers of attention", "tokens a second", {"": list(enumerate(speeds.values()))},
             f"training at {n:,} tokens", groups=tuple(speeds)),
    ]  # fmt: skip
    return Findings(table, checks, plots, f"Guessing: {2 / SYMBOLS:.2f}. At most {steps} steps each.")


def hybrid(places: tuple[int, ...]) -> DecoderModule:
    """Attention in these layers, Mamba-2 in the others."""
    mixers = [Attention(2) if i in places else Mamba2(state=4, head_dim=32, expand=1) for i in range(DEPTH)]
    layers = tuple(Repeat((block(mixer, WIDTH, neighbours=i == 0 and i in places),)) for i, mixer in enumerate(mixers))
    return Decoder(FIRST + SYMBOLS, WIDTH, layers).build()


def recalled(
    bench: Bench, name: str, model: DecoderModule, steps: int, pairs: tuple[int, ...]
) -> list[tuple[float, float]]:
    def batch(draws: torch.Generator, told: int, tokens: int) -> Batch:
        return associative_recall(draws, told, tokens // (4 * told), SYMBOLS)

    def mixed(draws: torch.Generator) -> Batch:
        return batch(draws, pairs[int(torch.randint(len(pairs), (), generator=draws))], 1024)

    fit(bench, f"attention: {name}", model, mixed, steps, 5e-3, enough=0.05)
    test = generator(bench.seed + 1)
    return [(k, accuracy(model, batch(test, k, bench.pick(4096, 64)))) for k in pairs]
