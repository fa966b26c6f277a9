"""Plots of a run: loss curve, attention maps, recurrent states. Needs matplotlib, the extra `plots`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

INK, ACCENT, SECOND, GRID = "#1f2933", "#3b6ea5", "#d9822b", "#e4e7eb"


def pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("plots need matplotlib: pip install 'regard[plots]'") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.size": 10, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
        "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
        "savefig.dpi": 150,
    })  # fmt: skip
    return plt


def loss_curve(metrics: Path, out: Path) -> None:
    """Loss over steps: every step in a faint line, the moving average in a strong one, held-out losses as points."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [r for r in records if r.get("loss") is not None]
    held_out = [r for r in records if "held_out_loss" in r]
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], color=ACCENT, alpha=0.25, linewidth=0.8)
    axes.plot(
        [r["step"] for r in steps], smooth([r["loss"] for r in steps]), color=ACCENT, linewidth=2, label="training"
    )
    if held_out:
        axes.plot(
            [r["step"] for r in held_out], [r["held_out_loss"] for r in held_out], "o-", color=SECOND, label="held out"
        )
    axes.set(xlabel="step", ylabel="loss (nats per weighted token)", yscale="log")
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10], labels=["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    axes.yaxis.set_minor_locator(plt.NullLocator())
    axes.set_ylim(0.8 * min(r["loss"] for r in steps), 1.2 * max(r["loss"] for r in steps))
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False)
    figure.savefig(out)
    plt.close(figure)


def smooth(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """An exponential moving average with bias correction."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        means.append(total / weight)
    return means


def attention_grid(
    maps: Mapping[tuple[int, int], Tensor], tokens: Sequence[str], out: Path, keys: Sequence[str] | None = None
) -> None:
    """A heat map per (layer, head): rows are queries, columns are keys; `keys` are the tokens of another sequence.

    Maps with negative entries (implied matrices) are drawn from blue, negative, to red.
    """
    plt, keys = pyplot(), tokens if keys is None else keys
    layers = sorted({layer for layer, _ in maps})
    heads = sorted({head for _, head in maps})
    single = len(maps) == 1  # large enough for the tokens' labels
    size = max(4.0, 0.22 * len(tokens)) if single else 2.2
    figure, grid = plt.subplots(
        len(layers), len(heads), figsize=(size * len(heads) + 0.6, size * len(layers) + 0.6), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads):
            axes = grid[row][column]
            axes.set_axis_off()
            if (layer, head) not in maps:
                continue
            axes.set_axis_on()
            values = maps[layer, head].float().cpu()
            limit = float(values.abs().max()) or 1.0
            colours = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit} if values.min() < 0 else {"vmin": 0}
            axes.imshow(values.numpy(), **{"cmap": "Blues"} | colours, aspect="equal", interpolation="nearest")
            axes.set_title(f"layer {layer}, head {head}", fontsize=9)
            axes.set_xticks(range(len(keys)) if single else [], labels=keys if single else [], rotation=90, fontsize=7)
            axes.set_yticks(range(len(tokens)) if single else [], labels=tokens if single else [], fontsize=7)
            for spine in axes.spines.values():
                spine.set_visible(True)
    figure.savefig(out)
    plt.close(figure)


def heat_map(values: Tensor, rows: Sequence[str], columns: Sequence[str], out: Path) -> None:
    """Values (rows, columns) from blue, negative, to red, with their labels."""
    plt = pyplot()
    figure, axes = plt.subplots(
        figsize=(max(4.0, 0.22 * len(columns)) + 2.5, max(2.0, 0.22 * len(rows)) + 1.0), layout="constrained"
    )
    limit = float(values.abs().max()) or 1.0
    image = axes.imshow(values.float().cpu().numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.set_xticks(range(len(columns)), labels=columns, rotation=90, fontsize=7)
    axes.set_yticks(range(len(rows)), labels=rows, fontsize=7)
    figure.colorbar(image, ax=axes)
    figure.savefig(out)
    plt.close(figure)


def state_grid(states: Mapping[str, Tensor], tokens: Sequence[str], out: Path) -> None:
    """A heat map per state: columns are tokens, rows the elements of the state after each token."""
    plt = pyplot()
    figure, grid = plt.subplots(
        len(states), 1, figsize=(max(4.0, 0.22 * len(tokens)), 2.0 * len(states) + 0.8), squeeze=False, sharex=True,
        layout="constrained",
    )  # fmt: skip
    for axes, (name, array) in zip(grid[:, 0], states.items(), strict=True):
        numbers = array.flatten(1).T.float().cpu()  # (F, L)
        limit = float(numbers.abs().max()) or 1.0
        axes.imshow(numbers.numpy(), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        axes.set_title(f"{name}, up to {limit:.2g}", fontsize=9)
        axes.set_yticks([])
    grid[-1, 0].set_xticks(range(len(tokens)), labels=tokens, rotation=90, fontsize=7)
    figure.savefig(out)
    plt.close(figure)


def rate_sweep(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float, out: Path
) -> None:
    """Loss over the learning rate of a range test, with the suggested rate as a vertical line."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot(rates, losses, color=ACCENT, alpha=0.25, linewidth=0.8)
    axes.plot(rates, smoothed, color=ACCENT, linewidth=2)
    axes.axvline(suggestion, color=SECOND, linewidth=1.5, label=f"suggested: {suggestion:g}")
    axes.set(xlabel="learning rate", ylabel="loss", xscale="log")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False)
    figure.savefig(out)
    plt.close(figure)
