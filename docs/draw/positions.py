"""Figures about positions: sinusoidal embeddings, effects of distance, RoPE scalings."""

from typing import Any

import torch

from plotting import BLUE, GREEN, GREY, LIGHT_GREY, ORANGE, PURPLE, canvas, label, tint
from regard.kernels.attention.bias import Buckets
from regard.layout import TokenLayout
from regard.parts.position.alibi import slopes
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import NTK, LinearScaling, Llama3, Scaling, Yarn
from regard.parts.position.sinusoidal import Sinusoidal


def sinusoids() -> Any:
    """Sines and cosines by position; orange above zero, blue below."""
    layout = TokenLayout.whole(1, 300)
    table = Sinusoidal(layout="half").build(64, 1).embed(torch.zeros(1, 300, 64), layout)[0].T  # (D, L)
    figure, (axes,) = canvas(height=2.4)
    tint(axes, table.clamp_min(0), ORANGE, "auto")
    tint(axes, (-table).clamp_min(0), BLUE, "auto")
    axes.set_yticks([2, 16, 29, 34, 48, 61], labels=["fast", "sine", "slow", "fast", "cosine", "slow"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.axhline(31.5, color=GREY, linewidth=0.8)
    axes.set_xlabel("position")
    axes.spines[:].set_visible(False)
    return figure


def distances() -> Any:
    """The effect of distance on a score, by scheme."""
    figure, (rope, alibi, t5) = canvas(1, 3, height=2.5)
    steps = torch.arange(0, 4001)
    theta = Rope().frequencies(128, TokenLayout.whole(1, 1))
    mean = (steps.unsqueeze(-1) * theta).cos().mean(-1)
    rope.plot(steps[1:].numpy(), mean[1:].numpy(), color=BLUE, linewidth=1)
    rope.set(title="RoPE: mean cosine, q = k", xscale="log", xlabel="distance", ylim=(-0.2, 1))
    rope.set_xticks([1, 10, 100, 1000], labels=["1", "10", "100", "1000"])
    rope.minorticks_off()
    near = torch.arange(0, 65)
    for head, slope in list(enumerate(slopes(8).tolist()))[::2]:
        alibi.plot(near.numpy(), (-slope * near).numpy(), color=ORANGE, linewidth=1.4)
        reach = min(64.0, 9.6 / slope)
        label(alibi, reach, -slope * reach, f"head {head + 1}", ORANGE, fontsize=8)
    alibi.set(title="ALiBi: bias of 8 heads", xlabel="distance", ylim=(-10, 0.5), xlim=(0, 84))
    far = torch.arange(0, 201)
    buckets = Buckets(torch.zeros(32, 1), 128, False)
    t5.plot(far.numpy(), buckets.bucket(-far).numpy(), color=GREEN, linewidth=1.6, drawstyle="steps-post")
    t5.set(title="T5: one of 32 buckets", xlabel="distance", yticks=[0, 16, 31])
    for panel in (rope, alibi, t5):
        panel.title.set(fontsize=9, color=GREY)
    return figure


def scalings() -> Any:
    """How many times slower each pair rotates, for eight times the trained length."""
    figure, (axes,) = canvas(height=3.0)
    whole, dim = TokenLayout.whole(1, 1), 128
    plain = Rope(500000.0).frequencies(dim, whole)
    lines: dict[str, tuple[Scaling, str, float, float]] = {
        "LinearScaling": (LinearScaling(8.0), ORANGE, 8, 8.8),
        "NTK": (NTK(8.0), PURPLE, 9, 1.75),
        "Yarn": (Yarn(8.0, 8192), BLUE, 21.5, 1.7),
        "Llama3": (Llama3(8.0, 8192), GREEN, 30, 1.45),
    }
    rotations = 8192 * plain / (2 * torch.pi)
    for name, (scaling, colour, x, y) in lines.items():
        slower = plain / Rope(500000.0, scaling=scaling).frequencies(dim, whole)
        axes.plot(slower.numpy(), color=colour, linewidth=2)
        axes.text(x, y, name, color=colour)
    full_rotations = int((rotations > 1).sum())
    axes.axvline(full_rotations, color=LIGHT_GREY, linewidth=1)
    label(axes, full_rotations, 1.25, "to the right: less than one rotation\nin the trained length", fontsize=8)
    axes.set(xlabel="pair (fast to slow)", ylabel="times slower", yscale="log", xlim=(0, 63), ylim=(0.9, 11))
    axes.set_yticks([1, 2, 4, 8], labels=["1", "2", "4", "8"])
    axes.minorticks_off()
    return figure
