"""The tokens of a batch go to different experts: batching gains less than in a dense model, and changes no output.

A decoder with two of eight experts per layer, trained on the Python manual with the balance loss, reads held-out rows.
A decode step with B rows has B tokens, which are those at one position of the rows: how many experts does the step
need, and how many of the choices are the busiest expert's? For comparison, B tokens that choose at random. Then every
row alone, and all rows in one batch, in float64. As a control the same in training with a limited capacity, where the
choices of other rows decide which tokens are dropped.

Speed: wide layers with random weights, two of eight experts and a dense one with as much work per token. A step of few
tokens is bound by the weights that it reads: those of all experts in use. Fedus et al. 2021; Rajbhandari et al. 2022.
"""

# ledger: moe.batching

import copy
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.experts import COUNT, ROW, manual, router_choices, train_decoder
from regard.labs.fit import generator
from regard.labs.mamba_language import draw_rows
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.parts.experts import Experts, ExpertsModule
from regard.parts.feedforward import SwiGLU

TOP_K, SIZES, STEP = 2, (1, 2, 4, 8, 16, 32, 64), 16  # STEP: tokens of the step that the predictions are about


@torch.no_grad()
def run(bench: Bench) -> Findings:
    train, held_out = manual(bench)
    with torch.enable_grad():
        model = train_decoder(bench, "2 of 8", train, bench.training(200, 2), bench.setting(8, 2))
    tokens = draw_rows(generator(bench.seed), held_out, bench.setting(256, 64), ROW).tokens
    chosen = router_choices(model, tokens).unflatten(1, tokens.shape)  # (layers, B, L, k)
    order = torch.rand(chosen.shape[:3] + (COUNT,), generator=generator(bench.seed)).argsort(-1)
    at_random = order[..., :TOP_K]
    usage = {name: [step_usage(found, n) for n in SIZES] for name, found in (("text", chosen), ("random", at_random))}
    compared = tokens[: bench.setting(32, 4)]
    exact, limited = (largest_difference(model, compared, capacity) for capacity in (None, 1.0))
    speed = tokens_per_second(bench)
    gains = {name: values[STEP] / values[1] for name, values in speed.items()}
    needed, busiest = usage["text"][SIZES.index(STEP)]
    checks = [
        Check("a row in a batch has the logits that it has alone: within 1e-12 of the largest, in float64",
              "yes" if exact <= 1e-12 else f"{exact:.1g}", exact <= 1e-12),
        Check("with a limited capacity, in training, it has not: they differ by more than 0.001", f"{limited:.2g}",
              limited > 1e-3),
        Check(f"one token needs {TOP_K} experts of a layer, a step of {STEP} tokens 7 of {COUNT} or more, on average",
              f"{needed:.1f}", needed >= COUNT - 1),
        Check(f"in a step of {STEP} tokens the busiest expert of a layer has 1.5 times its even share or more",
              f"{busiest:.2f}", busiest >= 1.5),
        Check(f"{STEP} tokens at once gain less speed with experts than in a dense layer: at most two thirds of it",
              f"{gains['2 of 8']:.1f}x and {gains['dense']:.1f}x", gains["2 of 8"] <= 2 / 3 * gains["dense"]),
        Check(f"but {STEP} tokens at once are at least 1.5 times as fast as one after another",
              f"{gains['2 of 8']:.1f}x", gains["2 of 8"] >= 1.5),
    ]  # fmt: skip
    table = [
        {"tokens": n, "experts needed": usage["text"][i][0], "at random": usage["random"][i][0],
         "busiest / even": usage["text"][i][1], "at random ": usage["random"][i][1]}
        | {f"{name}, tokens/s": values[n] for name, values in speed.items()}
        for i, n in enumerate(SIZES)
    ]  # fmt: skip
    lines = [{name: [(n, found[i]) for n, found in zip(SIZES, points, strict=True)] for name, points in usage.items()}
             for i in range(2)]  # fmt: skip
    faster = {name: [(n, values[n] / values[1]) for n in SIZES] for name, values in speed.items()}
    plots = [
        Plot("tokens of the step", "experts needed", lines[0], f"of {COUNT} in a layer", "x"),
        Plot("tokens of the step", "times an even share", lines[1], "the busiest expert", "xy"),
        Plot("tokens of the step", "times the speed of one token", faster, "speed of feed-forward layers", "xy"),
    ]
    return Findings(table, checks, plots, "The gain in speed is that of one machine and one thread.")


def step_usage(chosen: Tensor, size: int) -> tuple[float, float]:
    """For choices (layers, B, L, k), means over steps of `size` rows and layers: experts in use, and the largest load
    in times of an even share."""
    groups = chosen.unflatten(1, (-1, size)).movedim(2, 3).flatten(3)  # (layers, steps, L, size · k)
    loads = nn.functional.one_hot(groups, COUNT).sum(-2)  # (layers, steps, L, X)
    even = size * chosen.shape[-1] / COUNT
    return (loads > 0).sum(-1).double().mean().item(), (loads.amax(-1) / even).mean().item()


def largest_difference(model: DecoderModule, tokens: Tensor, capacity: float | None) -> float:
    """Between the logits of rows in a batch and alone, in float64; with a capacity as in training."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if isinstance(module, ExpertsModule):
            module.spec = replace(module.spec, capacity=capacity)
    model.train(capacity is not None)
    together, alone = model(tokens), torch.cat([model(row[None]) for row in tokens])
    assert isinstance(together, Tensor)
    return ((together - alone).abs().max() / alone.abs().max().clamp_min(1)).item()


def tokens_per_second(bench: Bench) -> dict[str, dict[int, float]]:
    """Of four layers, for steps of these many tokens; medians."""
    width, layers = bench.setting((1024, 4), (32, 1))
    torch.manual_seed(bench.seed)
    bodies = {"dense": SwiGLU(width), "2 of 8": Experts(COUNT, TOP_K, SwiGLU(width // TOP_K))}
    stacks = {name: nn.ModuleList(body.build(width) for _ in range(layers)).eval() for name, body in bodies.items()}
    speed: dict[str, dict[int, float]] = {name: {} for name in stacks}
    for size in bench.each("speed", SIZES):
        x, times = torch.randn(size, 1, width), {name: [] for name in stacks}
        for _ in range(bench.setting(9, 2)):
            for name, stack in stacks.items():
                start = time.perf_counter()
                for layer in stack:
                    layer(x, TokenLayout.whole(size, 1))
                times[name].append(time.perf_counter() - start)
        for name, seconds in times.items():
            speed[name][size] = size / statistics.median(seconds[1:])  # the first is a warm-up
    return speed
