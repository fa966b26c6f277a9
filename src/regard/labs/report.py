"""A lab's findings as files: result.json, plot.png and report.html, in runs/labs/<name>.

result.json has the points of the plots, so that nothing is lost where matplotlib, which plot.png needs, is missing.
"""

import json
import os
import platform
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard import __version__
from regard.labs.experiment import Findings, Measured, Plot
from regard.report.page import Page
from regard.report.plots import ACCENT, GRID, INK, SECOND, pyplot

COLOURS = (ACCENT, SECOND, "#3f9b6c", "#cf5c5c", "#8e6bbf", "#7b8794", "#b58900")
MARKERS = "os^vDPX"
POINT = re.compile(r"\[\s+(?:[-+\w.]+,\s+)+[-+\w.]+\s+\]")
SEVERAL_SEEDS = "Means over seeds {}, with the smallest and the largest value in brackets and as error bars."


def write(folder: Path, name: str, documentation: str, findings: Findings, settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"regard": __version__, "torch": torch.__version__, "machine": platform.machine()}
    cpu = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    result = {
        "lab": name,
        "claim": documentation.partition("\n")[0],
        "verdict": findings.verdict,
        "seeds": list(findings.seeds),
        "checks": [vars(check) for check in findings.checks],
        "table": [{name: as_json(value) for name, value in row.items()} for row in findings.table],
        "plots": [plot_as_json(plot) for plot in findings.plots],
        "remark": findings.remark,
        "settings": settings | environment | cpu,
    }
    text = POINT.sub(lambda point: " ".join(point[0].split()), json.dumps(result, indent=2))  # a point on one line
    (folder / "result.json").write_text(text + "\n", encoding="utf-8")
    picture = folder / "plot.png"
    drawable = find_spec("matplotlib") is not None
    if drawable:
        draw(findings.plots, picture)
    build_page(name, documentation, findings, picture if drawable else None).write(folder / "report.html")


def build_page(name: str, documentation: str, findings: Findings, picture: Path | None) -> Page:
    claim, _, experiment = documentation.partition("\n")
    page = Page(claim)
    for paragraph in experiment.strip().split("\n\n"):
        page.text(paragraph)
    page.text(findings.verdict, "big")
    page.table(
        ("expected", "seeds", "observed"),
        [
            ((check.expected, check.seeds, check.observed), "right" if check.holds else "wrong")
            for check in findings.checks
        ],
    )
    if picture is None:
        page.text("No plot: matplotlib is not installed (pip install 'regard[plots]').")
    else:
        page.picture(picture, f"regard lab {name}")
    header, rows = cells(findings)
    page.table(header, [(row, "") for row in rows])
    if findings.remark:
        page.text(findings.remark)
    if len(findings.seeds) > 1:
        page.text(SEVERAL_SEEDS.format(", ".join(map(str, findings.seeds))))
    return page


def as_json(value: Any) -> Any:
    return vars(value) if isinstance(value, Measured) else value


def plot_as_json(plot: Plot) -> dict[str, Any]:
    """Points are [x, y], or [x, y, low, high] over several seeds."""
    lines = {
        name: [
            [*point, *spread] for point, spread in zip(points, plot.ranges.get(name, [()] * len(points)), strict=True)
        ]
        for name, points in plot.lines.items()
    }
    return {"title": plot.title, "x": plot.x, "y": plot.y, "log": plot.log, "groups": list(plot.groups), "lines": lines}


def cells(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """The header and the formatted rows of the table."""
    return list(findings.table[0]), [[format_value(value) for value in row.values()] for row in findings.table]


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def draw(plots: Sequence[Plot], out: Path) -> None:
    plt = pyplot()
    legends = 1.8 * sum(bool(plot.groups) and len(plot.lines) > 1 for plot in plots)  # bars leave no space inside
    figure, panels = plt.subplots(
        1, len(plots), figsize=(0.6 + 4.6 * len(plots) + legends, 3.6), layout="constrained", squeeze=False
    )
    for axes, plot in zip(panels[0], plots, strict=True):
        (draw_bars if plot.groups else draw_lines)(axes, plot)
        axes.set(xlabel=plot.x, ylabel=plot.y, title=plot.title)
        axes.set_axisbelow(True)
        axes.grid(color=GRID, linewidth=0.8, axis="y" if plot.groups else "both")
        if len(plot.lines) > 1:
            position = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if plot.groups else {}
            axes.legend(frameon=False, fontsize=8, **position)
    figure.savefig(out)
    plt.close(figure)


def draw_lines(axes: Any, plot: Plot) -> None:
    for i, (label, points) in enumerate(plot.lines.items()):
        x, y = zip(*points, strict=True)
        marker = MARKERS[i % len(MARKERS)] if len(points) <= 24 else ""
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(x, y, marker=marker, color=colour, label=label, linewidth=1.8, markersize=5)
        if label not in plot.ranges:
            continue
        low, high = zip(*plot.ranges[label], strict=True)
        if marker:
            axes.errorbar(x, y, error_bars(y, low, high), fmt="none", ecolor=colour, capsize=3, linewidth=1.2)
        else:
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    if "x" in plot.log:
        axes.set_xscale("log")
    if "y" in plot.log:
        axes.set_yscale("log")
        label_with_decimals(axes.yaxis)
    ticks = sorted({x for points in plot.lines.values() for x, _ in points})
    labels = [f"{x:,g}" for x in ticks]
    if len(ticks) <= 10 and sum(map(len, labels)) <= 40:  # longer ones would overlap
        axes.set_xticks([], minor=True)
        axes.set_xticks(ticks, labels)


def error_bars(y: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Distances down and up from the mean, as matplotlib takes them; rounding can put a mean just outside its range."""
    return [
        [max(0.0, mean - least) for mean, least in zip(y, low, strict=True)],
        [max(0.0, most - mean) for mean, most in zip(y, high, strict=True)],
    ]


def label_with_decimals(axis: Any) -> None:
    """Label a logarithmic axis of a few decades with 0.5 instead of 5 × 10⁻¹."""
    low, high = axis.get_view_interval()
    if high > 1e6 * low:
        return
    axis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter("")


def draw_bars(axes: Any, plot: Plot) -> None:
    width = 0.8 / len(plot.lines)
    for i, (label, points) in enumerate(plot.lines.items()):
        x, y = zip(*points, strict=True)
        centers = [index - 0.4 + (i + 0.5) * width for index in x]
        axes.bar(centers, y, width, color=COLOURS[i % len(COLOURS)], label=label)
        if label in plot.ranges:
            low, high = zip(*plot.ranges[label], strict=True)
            axes.errorbar(centers, y, error_bars(y, low, high), fmt="none", ecolor=INK, capsize=2, linewidth=1)
    axes.set_xticks(range(len(plot.groups)), plot.groups)
