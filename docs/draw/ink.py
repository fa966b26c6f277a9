"""The canvas and its inks: no background and middle tones, so that light pages and dark ones can show the pictures."""

from typing import Any

import torch
from torch import Tensor

from regard.report.plots import pyplot

INK, FAINT = "#80868f", "#80868f40"
BLUE, ORANGE, GREEN, RED, PURPLE = "#4a86c9", "#d9822b", "#3f9b6c", "#cf5c5c", "#8e6bbf"


def canvas(rows: int = 1, columns: int = 1, width: float = 7.2, height: float = 2.8) -> tuple[Any, list[Any]]:
    plt = pyplot()
    plt.rcParams.update({
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.size": 9,
        "font.family": "DejaVu Sans", "savefig.transparent": True, "savefig.dpi": 144,
    })  # fmt: skip
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for each in axes.flat:
        each.spines[:].set_color(FAINT)
        each.tick_params(color=FAINT)
        each.patch.set_alpha(0)
    return figure, list(axes.flat)


def label(axes: Any, x: float, y: float, text: str, colour: str = INK, **how: Any) -> None:
    """A name beside what it names."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", color=colour, va="center", **how)


def cells(axes: Any, weights: Tensor, title: str, colour: str = BLUE) -> None:
    """A small matrix: the stronger the colour, the larger the number; an outline so that what is empty has a shape."""
    tint(axes, torch.full_like(weights, 0.13), INK)
    tint(axes, weights, colour)
    axes.set_title(title, fontsize=9, color=INK)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def tint(axes: Any, strength: Tensor, colour: str, aspect: str = "equal") -> None:
    """One colour, as opaque as the numbers (rows, columns) are large, from 0 to 1."""
    from matplotlib.colors import to_rgb

    image = torch.cat([torch.tensor(to_rgb(colour)).expand(*strength.shape, 3), strength.float().unsqueeze(-1)], -1)
    axes.imshow(image.clamp(0, 1).numpy(), aspect=aspect, interpolation="nearest")
