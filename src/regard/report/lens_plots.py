"""The figures of a lens report: all heads in one picture, lines over layers, and signed bars."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.report.plots import ACCENT, GRID, INK, SECOND, pyplot

LINES = (ACCENT, SECOND, "#3f9b6c", "#8e6bbf")


def head_mosaic(maps: Sequence[Tensor | None], out: Path) -> None:
    """All heads (H, L, L) of all layers as small squares, each with its own scale; layers run down or to the right."""
    plt = pyplot()
    present = [(layer, weights.float().cpu()) for layer, weights in enumerate(maps) if weights is not None]
    heads, length = max(len(weights) for _, weights in present), present[0][1].shape[-1]
    across = len(present) > 1.5 * heads  # a deep model: layers to the right
    cell = length + max(1, length // 12)
    image = torch.full((len(present) * cell, heads * cell), torch.nan)
    image = image.new_full((heads * cell, len(present) * cell), torch.nan) if across else image
    for place, (_, weights) in enumerate(present):
        for head, one in enumerate(weights):
            row, column = (head, place) if across else (place, head)
            square = image[row * cell : row * cell + length, column * cell : column * cell + length]
            square.copy_(one / (float(one.abs().max()) or 1.0))
    signed = bool(torch.nan_to_num(image).min() < 0)
    colours = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1} if signed else {"cmap": "Blues", "vmin": 0, "vmax": 1}
    rows, columns = (size // cell for size in image.shape)
    side = min(0.95, 11.0 / columns)
    figure, axes = plt.subplots(figsize=(side * columns + 0.6, side * rows + 0.5), layout="constrained")
    axes.imshow(image.numpy(), **colours, interpolation="nearest" if length < 48 else "antialiased")
    layers = [layer for layer, _ in present]
    ticks = [[place * cell + length / 2 for place in range(count)] for count in (rows, columns)]
    axes.set_xticks(ticks[1], labels=layers if across else range(heads), fontsize=8)
    axes.set_yticks(ticks[0], labels=range(heads) if across else layers, fontsize=8)
    axes.set(xlabel="layer" if across else "head", ylabel="head" if across else "layer")
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(out, dpi=170)
    plt.close(figure)


def layer_lines(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    out: Path,
    log: Sequence[str] = (),
    x: str = "layer (0: embeddings)",
) -> None:
    """A panel per title: lines over the layers. log: titles with a logarithmic axis."""
    plt = pyplot()
    figure, grid = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.0), squeeze=False, layout="constrained")
    for axes, (title, lines) in zip(grid[0], panels.items(), strict=True):
        for (name, values), colour in zip(lines.items(), LINES, strict=False):
            axes.plot(range(len(values)), values, "o-", color=colour, label=name, markersize=3, linewidth=1.6)
        axes.set(xlabel=x, title=title, yscale="log" if title in log else "linear")
        axes.xaxis.get_major_locator().set_params(integer=True)  # layers
        axes.grid(color=GRID, linewidth=0.8)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(out)
    plt.close(figure)


def signed_bars(values: Mapping[str, float], out: Path) -> None:
    """Horizontal bars from a zero line, in the order given from the top."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 0.24 * len(values) + 0.9), layout="constrained")
    names, numbers = list(values), list(values.values())
    axes.barh(range(len(names)), numbers, color=[ACCENT if number >= 0 else SECOND for number in numbers], height=0.7)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(names)), labels=names, fontsize=8)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8, axis="x")
    figure.savefig(out)
    plt.close(figure)
