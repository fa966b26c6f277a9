"""Plots of several runs: loss curves over tokens or steps, and held-out losses of a sweep over its varied values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from regard.report.plots import ACCENT, GRID, INK, SECOND, pyplot, smooth

LOG_RATIO = 5  # values in a range beyond this ratio are drawn on a logarithmic axis
MAX_LABELS = 9  # runs that a legend names
MAX_TICKS = 6  # values that an axis names


class CurveData(Protocol):
    """A point of a loss curve."""

    @property
    def step(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def loss(self) -> float: ...


Curves = Mapping[str, tuple[Sequence[CurveData], Sequence[CurveData]]]  # (training, held out) of every run


def run_curves(curves: Curves, out: Path, by: str = "tokens") -> None:
    """Training loss over `by` ("tokens" or "steps"), one line per run, with its held-out losses as markers."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    draw_curves(plt, axes, curves, by)
    figure.savefig(out)
    plt.close(figure)


def sweep_results(curves: Curves, varied: Mapping[str, Sequence[tuple[str, float]]], out: Path) -> None:
    """The loss curves of a sweep's trials, and beside them the held-out loss over each varied value.

    varied: (value, held-out loss) of every trial, in the order of the curves, by the value's dotted name.
    """
    plt = pyplot()
    count = 1 + len(varied)
    figure, grid = plt.subplots(1, count, figsize=(5.5 + 3.2 * len(varied), 4.2), layout="constrained", squeeze=False,
        width_ratios=[1.7] + [1] * len(varied))  # fmt: skip
    draw_curves(plt, grid[0][0], curves, "tokens")
    for axes, (name, results) in zip(grid[0][1:], varied.items(), strict=True):
        draw_values(axes, name, results, run_colours(plt, len(curves)))
    figure.savefig(out)
    plt.close(figure)


def draw_curves(plt: Any, axes: Any, curves: Curves, by: str) -> None:
    colours = run_colours(plt, len(curves))
    for colour, (name, (training, held_out)) in zip(colours, curves.items(), strict=True):
        x, y = [position_of(point, by) for point in training], [point.loss for point in training]
        axes.plot(x, y, color=colour, alpha=0.2, linewidth=0.8)
        label = name if not held_out else f"{name}  ({held_out[-1].loss:.3f})"
        axes.plot(x, smooth_both_ways(y), color=colour, linewidth=1.8, label=label)
        axes.plot(
            [position_of(point, by) for point in held_out], [point.loss for point in held_out],
            "o", color=colour, markersize=6, markeredgecolor="white", markeredgewidth=1.0, zorder=3,
        )  # fmt: skip
    losses = [point.loss for run in curves.values() for points in run for point in points]
    if losses and min(losses) > 0:
        set_loss_axis(plt, axes, losses)
    axes.set(xlabel=by, ylabel="loss")
    axes.xaxis.set_major_formatter(plt.matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(color=GRID, linewidth=0.8)
    if len(curves) <= MAX_LABELS:
        title = "line: training, marker: held out (last value)"
        axes.legend(frameon=False, title=title, title_fontsize=9, fontsize=9, alignment="left")


def draw_values(axes: Any, name: str, results: Sequence[tuple[str, float]], colours: Sequence[Any]) -> None:
    """One point per trial, in the colour of its curve, and a line through the best of each value."""
    try:
        positions = {value: float(value) for value, _ in results}
    except ValueError:
        positions = {value: float(i) for i, value in enumerate(dict.fromkeys(value for value, _ in results))}
    best = {value: min(loss for other, loss in results if other == value) for value in positions}
    ordered = sorted(best, key=lambda value: positions[value])
    axes.plot([positions[value] for value in ordered], [best[value] for value in ordered], color=INK, linewidth=0.8)
    for colour, (value, loss) in zip(colours, results, strict=True):
        axes.plot(positions[value], loss, "o", color=colour, markersize=8, markeredgecolor="white")
    low, high = min(positions.values()), max(positions.values())
    if low > 0 and high > LOG_RATIO * low:
        axes.set_xscale("log")
    if len(positions) <= MAX_TICKS:
        axes.set_xticks([positions[value] for value in ordered], labels=ordered)
        axes.minorticks_off()
    axes.margins(x=0.15, y=0.1)
    axes.set(xlabel=name, ylabel="held-out loss")
    axes.grid(color=GRID, linewidth=0.8)


def run_colours(plt: Any, count: int) -> list[Any]:
    """Distinct colours for few runs, a gradual scale for many."""
    if count <= MAX_LABELS:
        first, _, *others = plt.get_cmap("Dark2").colors  # its second colour is too similar to SECOND
        return [ACCENT, SECOND, first, *others, INK][:count]
    return [plt.get_cmap("viridis")(i / (count - 1)) for i in range(count)]


def smooth_both_ways(values: Sequence[float]) -> list[float]:
    """The mean of moving averages from both ends, which does not lag behind a falling curve."""
    decay = 1 - 1 / (1 + len(values) / 50)  # a window of about 2 % of the curve
    forward, backward = smooth(values, decay), smooth(values[::-1], decay)[::-1]
    return [(a + b) / 2 for a, b in zip(forward, backward, strict=True)]


def set_loss_axis(plt: Any, axes: Any, losses: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers."""
    low, high = 0.95 * min(losses), 1.05 * max(losses)
    axes.set_yscale("log")
    ticks = [tick * 10.0**power for power in range(-4, 5) for tick in (1, 1.5, 2, 3, 4, 5, 6, 8)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, labels=[f"{tick:g}" for tick in shown])
    axes.yaxis.set_minor_locator(plt.NullLocator())
    axes.set_ylim(low, high)


def position_of(point: CurveData, by: str) -> int:
    return point.tokens if by == "tokens" else point.step
