"""Axes and colours for figures: transparent background and medium tones, readable on light and dark pages."""

from typing import Any

import torch
from torch import Tensor

from regard.report.plots import pyplot

GREY, LIGHT_GREY = "#80868f", "#80868f40"
BLUE, ORANGE, GREEN, RED, PURPLE = "#4a86c9", "#d9822b", "#3f9b6c", "#cf5c5c", "#8e6bbf"


def canvas(rows: int = 1, columns: int = 1, width: float = 7.2, height: float = 2.8) -> tuple[Any, list[Any]]:
    plt = pyplot()
    plt.rcParams.update({
        "text.color": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "font.size": 9,
        "font.family": "DejaVu Sans", "savefig.transparent": True, "savefig.dpi": 144,
    })  # fmt: skip
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for panel in axes.flat:
        panel.spines[:].set_color(LIGHT_GREY)
        panel.tick_params(color=LIGHT_GREY)
        panel.patch.set_alpha(0)
    return figure, list(axes.flat)


def label(axes: Any, x: float, y: float, text: str, colour: str = GREY, **options: Any) -> None:
    """Write a label to the right of a point."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", color=colour, va="center", **options)


def cells(axes: Any, weights: Tensor, title: str, colour: str = BLUE) -> None:
    """Draw a small matrix of numbers from 0 to 1 by opacity, on a grey background."""
    tint(axes, torch.full_like(weights, 0.13), GREY)
    tint(axes, weights, colour)
    axes.set_title(title, fontsize=9, color=GREY)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def tint(axes: Any, strength: Tensor, colour: str, aspect: str = "equal") -> None:
    """Draw the numbers (rows, columns) from 0 to 1 as the opacity of one colour."""
    from matplotlib.colors import to_rgb

    image = torch.cat([torch.tensor(to_rgb(colour)).expand(*strength.shape, 3), strength.float().unsqueeze(-1)], -1)
    axes.imshow(image.clamp(0, 1).numpy(), aspect=aspect, interpolation="nearest")
