"""Pictures of generative models: grids of images, points beside the data, and maps of the codes. Needs matplotlib."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.report.plots import ACCENT, GRID, INK, SECOND, pyplot


def image_grid(images: Tensor, out: Path, columns: int, titles: Sequence[str] = ()) -> None:
    """Images (N, C, H, W) row by row; titles: one per image, or none."""
    plt = pyplot()
    rows = ceil(len(images) / columns)
    height, top, gap = (0.95, 0.94, 0.3) if titles else (0.75, 0.99, 0.06)
    figure, grid = plt.subplots(rows, columns, figsize=(0.75 * columns, height * rows), squeeze=False)
    low = -1.0 if images.min() < -0.05 else 0.0
    for axes, number in zip(grid.flat, range(rows * columns), strict=True):
        axes.axis("off")
        if number < len(images):
            show(axes, images[number], low)
            axes.set_title(titles[number] if titles else "", fontsize=8, pad=2)
    figure.subplots_adjust(0.01, 0.01, 0.99, top, wspace=0.06, hspace=gap)
    figure.savefig(out)
    plt.close(figure)


def show(axes: Any, image: Tensor, low: float, extent: Sequence[float] | None = None) -> None:
    shown = ((image - low) / (1 - low)).clamp(0, 1).movedim(0, -1)  # (H, W, C)
    options = {"cmap": "gray_r", "vmin": 0, "vmax": 1} if shown.shape[-1] == 1 else {}
    axes.imshow(shown.squeeze(-1).numpy(), interpolation="nearest", extent=extent, **options)


def point_plot(samples: Tensor, data: Tensor | None, out: Path) -> None:
    """Samples (N, 2) over points of the data."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(4.8, 4.8), layout="constrained")
    if data is not None:
        axes.plot(*data.T.numpy(), ".", color=INK, alpha=0.25, markersize=4, label="data")
    axes.plot(*samples.T.numpy(), ".", color=SECOND, alpha=0.7, markersize=4, label="samples")
    axes.set_aspect("equal")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(out)
    plt.close(figure)


def latent_map(decoded: Tensor, limit: float, out: Path, codes: Tensor | None, labels: Sequence[int] | None) -> None:
    """Images decoded on a square grid of codes (side, side, C, H, W), and beside it the codes of examples (N, 2).

    The first axis of the grid is the second number of the code, from `limit` down to `-limit`.
    """
    plt = pyplot()
    count = 1 if codes is None else 2
    figure, grid = plt.subplots(1, count, figsize=(5 * count, 5), layout="constrained", squeeze=False)
    side = len(decoded)
    whole = torch.cat([torch.cat(list(row), -1) for row in decoded], -2)  # (C, side · H, side · W)
    edge = limit * (1 + 1 / (side - 1))
    show(grid[0][0], whole, -1.0 if whole.min() < -0.05 else 0.0, (-edge, edge, -edge, edge))
    borders = torch.linspace(-edge, edge, side + 1).tolist()  # a gap, so that images do not touch
    grid[0][0].vlines(borders, -edge, edge, color="white", linewidth=2)
    grid[0][0].hlines(borders, -edge, edge, color="white", linewidth=2)
    grid[0][0].set(xlabel="first number of the code", ylabel="second number", title="decoded codes")
    if codes is not None:
        axes = grid[0][1]
        colours = ACCENT if labels is None else list(labels)
        points = axes.scatter(*codes.T.numpy(), c=colours, cmap="tab10", s=9, alpha=0.8)
        axes.set(xlabel="first number of the code", title="codes of held-out examples")
        axes.set_aspect("equal", adjustable="datalim")
        axes.grid(color=GRID, linewidth=0.8)
        if labels is not None:
            handles, names = points.legend_elements(num=None)
            axes.legend(handles, names, frameon=False, fontsize=8, loc="upper right", title="label")
    figure.savefig(out)
    plt.close(figure)
