"""Figures about stacks, experts, schedules and sampling."""

from typing import Any

import torch

from plotting import BLUE, GREEN, GREY, LIGHT_GREY, ORANGE, RED, canvas, cells, label
from regard.engine.request import Sampling
from regard.engine.sampling import apply_filters
from regard.lens import record
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.norm import LayerNorm
from regard.planning import plan
from regard.planning.flops import body_flops
from regard.planning.parameters import all_bodies
from regard.planning.published import PUBLISHED
from regard.training.schedule import Constant, Cosine, WarmupStableDecay


def routing() -> Any:
    """The two of eight experts that each token is routed to."""
    experts = untrained(Experts(8, 2, SwiGLU(32)), 32)
    tokens = torch.randn(24, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        routing = experts.router.route(experts.router(tokens))
    weights = torch.zeros(24, 8).scatter(1, routing.chosen, routing.weights).T  # (X, T)
    figure, (left, right) = canvas(1, 2, height=2.1)
    left.get_gridspec().set_width_ratios([4, 1])
    cells(left, weights, "weight of an expert (row) for a token (column)")
    left.set_aspect("auto")
    load = (weights > 0).sum(1)
    right.barh(range(8), load.numpy(), color=ORANGE, height=0.62)
    right.axvline(6, color=GREY, linewidth=1, linestyle=":")
    right.set(xticks=[0, 6], yticks=[], ylim=(7.5, -0.5))
    right.set_title("tokens (balanced: 6)", fontsize=9, color=GREY)
    right.spines[:].set_visible(False)
    return figure


def depth() -> Any:
    """The size of the residual stream after untrained stacks, by depth."""
    figure, (axes,) = canvas(height=2.6)
    depths, tokens = [2, 4, 8, 16, 32, 64], torch.randint(512, (4, 32), generator=torch.Generator().manual_seed(0))
    pre = Block((Sublayer(Attention(4)), Sublayer(SwiGLU(344))))
    post = Block(tuple(Sublayer(body, LayerNorm()) for body in (Attention(4), FeedForward(512))), style="post")
    variants = {
        "pre-norm, xavier": (pre, "xavier", RED),
        "pre-norm, fan_in": (pre, "fan_in", BLUE),
        "pre-norm, gpt2": (pre, "gpt2", ORANGE),
        "post-norm": (post, "xavier", GREEN),
    }
    for name, (block, scheme, colour) in variants.items():
        sizes = []
        for count in depths:
            model = Decoder(512, 128, (Repeat((block,), count),)).build(seed=0, scheme=scheme)
            with torch.no_grad(), record(model, f"stack.blocks.{count - 1}") as recorded:
                model(tokens)
            sizes.append(recorded[f"stack.blocks.{count - 1}"].square().mean().sqrt().item())
        axes.plot(depths, sizes, color=colour, linewidth=2, marker="o", markersize=3)
        label(axes, depths[-1], sizes[-1], name, colour)
    axes.set(xlabel="blocks in the stack", ylabel="output of the stack\n(root mean square)", xscale="log", yscale="log")
    axes.set_xticks(depths, labels=[str(count) for count in depths])
    axes.set_yticks([0.1, 1, 10], labels=["0.1", "1", "10"])
    axes.set_xlim(1.9, 150)
    axes.minorticks_off()
    return figure


def untrained(body: Body, width: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return body.build(width).eval()


def crossover() -> Any:
    """FLOPs per token of Llama 3.1 8B by the number of keys."""
    spec = PUBLISHED["llama-3.1-8b"].spec()
    lengths = [2**n for n in range(8, 18)]
    bodies = all_bodies(spec)
    weight_flops = sum(body_flops(body, width, 1, 0) for body, width in bodies)
    score_flops = [sum(body_flops(body, width, 1, n) for body, width in bodies) - weight_flops for n in lengths]
    figure, (axes,) = canvas(height=2.6)
    axes.plot(lengths, [weight_flops] * len(lengths), color=BLUE, linewidth=2)
    axes.plot(lengths, score_flops, color=ORANGE, linewidth=2)
    label(axes, lengths[-1], weight_flops, "weights of the blocks", BLUE)
    label(axes, lengths[-1], score_flops[-1], "scores and weighted sum", ORANGE)
    cache = plan(spec, 1, dtype="bfloat16").kv_bytes_per_token
    axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="FLOPs per token", xlim=(220, 900000))
    axes.set_xticks([256, 1024, 4096, 16384, 65536], labels=["256", "1k", "4k", "16k", "64k"])
    axes.minorticks_off()
    axes.set_title(f"Llama 3.1 8B, cache of {cache // 1024} KiB per token", fontsize=9, color=GREY)
    return figure


def schedules() -> Any:
    figure, (axes,) = canvas(height=2.2)
    lines = {
        "Constant": (Constant(100), GREY, 1000, 1.0),
        "Cosine": (Cosine(100), BLUE, 1000, 0.1),
        "WarmupStableDecay": (WarmupStableDecay(100), ORANGE, 1000, 0.0),
    }
    for name, (schedule, colour, x, y) in lines.items():
        axes.plot([schedule.factor(step, 1000) for step in range(1000)], color=colour, linewidth=2)
        label(axes, x, y, name, colour)
    axes.set(xlabel="step", ylabel="fraction of the peak rate", xlim=(0, 1260), ylim=(-0.05, 1.08), yticks=[0, 0.5, 1])
    axes.set_xticks([0, 100, 500, 1000])
    return figure


def filters() -> Any:
    """One distribution, and its probabilities after each setting."""
    logits = torch.tensor([2.2, 1.9, 1.5, 1.1, 0.5, 0.2, -0.2, -0.8, -1.2, -1.9])
    panels = {
        "unchanged": Sampling(),
        "temperature 0.5": Sampling(temperature=0.5),
        "temperature 2": Sampling(temperature=2.0),
        "top_k 3": Sampling(top_k=3),
        "top_p 0.8": Sampling(top_p=0.8),
        "min_p 0.2": Sampling(min_p=0.2),
    }
    figure, axes = canvas(1, 6, height=1.5)
    for panel, (title, sampling) in zip(axes, panels.items(), strict=True):
        filtered = apply_filters(logits[None], [sampling]).softmax(-1)[0]
        panel.bar(range(10), logits.softmax(-1).numpy(), color=LIGHT_GREY, width=0.8)
        panel.bar(range(10), filtered.numpy(), color=BLUE, width=0.5)
        panel.set_title(title, fontsize=9, color=GREY)
        panel.set(xticks=[], yticks=[], ylim=(0, 0.52))
        panel.spines[["left", "bottom"]].set_visible(False)
    return figure
