"""The report of a scaling study: the law, IsoFLOP curves and recommended sizes, as tables, pictures and a page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from regard.planning.scaling import ScalingRun
from regard.planning.scaling_study import ScalingStudy
from regard.report.page import Page
from regard.report.plots import ACCENT, GRID, INK, SECOND, pyplot
from regard.report.run_plots import run_colours, set_loss_axis

WORDS = {
    "alpha": "alpha: loss over size",
    "beta": "beta: loss over tokens",
    "size_of_optimum": "law: best N ∝ C^",
    "tokens_of_optimum": "law: best D ∝ C^",
    "size_of_isoflop": "IsoFLOP: best N ∝ C^",
    "tokens_of_isoflop": "IsoFLOP: best D ∝ C^",
}
NO_CURVES = "no IsoFLOP curves: no compute lies between two token counts of at least three sizes"
TableRows = list[dict[str, str]]


def law_text(found: ScalingStudy) -> str:
    law, runs = found.fit.law, len(found.fit.runs)
    return (
        f"L(N, D) = {law.floor:.4g} + {law.size:.4g} / N^{law.size_exponent:.4g} + "
        f"{law.data:.4g} / D^{law.data_exponent:.4g}   relative error {found.fit.error:.2%} over {runs} runs"
    )


def exponent_rows(found: ScalingStudy) -> TableRows:
    rows = [
        {"exponent": WORDS[name], "value": f"{value:.3f}", "90 % interval": spread_text(spread, "{:.3f}")}
        for name, (value, spread) in found.exponents.items()
    ]
    if found.isoflops.size_exponent is None:
        inside = sum(found_curve.size is not None for found_curve in found.isoflops.curves)
        text = f"{inside} of {len(found.isoflops.curves)} curves have their minimum between the sizes"
        text = text if found.isoflops.curves else NO_CURVES
        rows.append({"exponent": "IsoFLOP", "value": "–", "90 % interval": text})
    return rows


def optimum_rows(found: ScalingStudy) -> TableRows:
    rows = []
    for budget in found.budgets:
        best = found.optimum(budget)
        cells = {"C = 6·N·D": f"{budget:.3g}"}
        for name, key, form in (("best N", "parameters", "{:,.3g}"), ("best D", "tokens", "{:,.3g}")):
            cells[name] = f"{best[key]['value']:.3g} {spread_text(best[key]['interval'], form)}"
        cells["D / N"] = f"{best['tokens']['value'] / best['parameters']['value']:.3g}"
        cells["loss"] = f"{best['loss']['value']:.4f} {spread_text(best['loss']['interval'], '{:.4f}')}"
        rows.append(cells)
    return rows


def spread_text(interval: Any, form: str) -> str:
    return "not determined" if interval is None else "[" + ", ".join(form.format(end) for end in interval) + "]"


def write_page(found: ScalingStudy, out: Path) -> None:
    """report.html in a directory that has the pictures."""
    page = Page("Scaling laws")
    page.text(law_text(found))
    page.picture(out / "scaling.png", "Held-out losses (points) and the law (lines), over tokens and over parameters.")
    page.heading("Exponents")
    add_table(page, exponent_rows(found))
    page.heading("Equal compute")
    if found.isoflops.curves:
        page.picture(
            out / "isoflop.png",
            "Left: the loss over the size at equal compute; a star is the vertex of a parabola. Right: the best size "
            "over compute, from the vertices and from the law with its 90 % interval.",
        )
    else:
        page.text(f"There are {NO_CURVES}.")
        page.picture(out / "isoflop.png", "The best size over compute, from the law with its 90 % interval.")
    page.heading("The best size for a compute")
    page.text("By the law, with C = 6·N·D. Beyond the compute of the largest run it is an extrapolation.")
    add_table(page, optimum_rows(found))
    page.heading("Runs")
    law = found.fit.law
    add_table(
        page,
        [
            {"N": f"{run.parameters:,.0f}", "D": f"{run.tokens:,.0f}", "counted FLOPs": f"{run.flops:.3g}",
             "held-out loss": f"{run.loss:.4f}", "law": f"{law.loss(run.parameters, run.tokens):.4f}"}
            for run in found.fit.runs
        ],
    )  # fmt: skip
    page.write(out / "report.html")


def add_table(page: Page, rows: TableRows) -> None:
    page.table(rows[0], [(row.values(), "") for row in rows])


def draw_law(found: ScalingStudy, out: Path) -> None:
    """Loss over tokens with a line per size, and over sizes with a line per token count."""
    plt, law, runs = pyplot(), found.fit.law, found.fit.runs
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", sharey=True)
    draw_lines(plt, left, runs, lambda run: run.parameters, lambda run: run.tokens, law.loss, "N")
    draw_lines(plt, right, runs, lambda run: run.tokens, lambda run: run.parameters, lambda d, n: law.loss(n, d), "D")
    left.set(xlabel="training tokens D", ylabel="held-out loss")
    right.set(xlabel="non-embedding parameters N")
    set_loss_axis(plt, left, [run.loss for run in runs])
    figure.savefig(out)
    plt.close(figure)


def draw_lines(
    plt: Any,
    axes: Any,
    runs: Sequence[ScalingRun],
    group: Callable[[ScalingRun], float],
    x: Callable[[ScalingRun], float],
    loss: Callable[[float, float], float],
    name: str,
) -> None:
    """A line of the law and points of the runs for every value of `group`; loss takes this value and x."""
    values, ends = sorted({group(run) for run in runs}), [x(run) for run in runs]
    steps = [min(ends) * (max(ends) / min(ends)) ** (i / 60) for i in range(61)]
    for colour, value in zip(run_colours(plt, len(values)), values, strict=True):
        chosen = [run for run in runs if group(run) == value]
        axes.plot(steps, [loss(value, step) for step in steps], color=colour, linewidth=1.4)
        label = f"{name} = {value:.3g}"
        axes.plot([x(run) for run in chosen], [run.loss for run in chosen], "o", color=colour, label=label)
    axes.set_xscale("log")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)


def draw_isoflops(found: ScalingStudy, out: Path) -> None:
    """Loss over size at equal compute, and the best size over compute."""
    plt, law, curves = pyplot(), found.fit.law, found.isoflops.curves
    panels = 2 if curves else 1  # without curves the left panel would be empty
    figure, grid = plt.subplots(1, panels, figsize=(5.5 * panels, 4.4), layout="constrained", squeeze=False)
    left, right = grid[0][0], grid[0][-1]
    for colour, curve in zip(run_colours(plt, len(curves)), curves, strict=True):
        sizes, losses = zip(*curve.points, strict=True)
        left.plot(sizes, losses, "o-", color=colour, linewidth=1, markersize=4, label=f"{curve.compute:.2g} FLOPs")
        if curve.size is not None:
            left.plot(curve.size, curve.loss, "*", color=colour, markersize=12, markeredgecolor=INK)
    if curves:
        left.set(xlabel="non-embedding parameters N", ylabel="held-out loss", xscale="log")
    vertices = [curve for curve in curves if curve.size is not None]
    if vertices:
        points = [curve.compute for curve in vertices], [curve.size for curve in vertices]
        right.plot(*points, "*", color=SECOND, markersize=11, label="vertices of parabolas (counted FLOPs)")
    largest = [6 * run.parameters * run.tokens for run in found.fit.runs]
    ends = min(largest), max(largest)
    steps = [ends[0] * (ends[1] / ends[0]) ** (i / 30) for i in range(31)]
    right.plot(steps, [law.optimum(step)[0] for step in steps], color=ACCENT, label="law (6·N·D FLOPs)")
    if found.fit.interval(lambda law: 0.0):
        spreads = [found.optimum(step)["parameters"]["interval"] for step in steps]
        right.fill_between(steps, *zip(*spreads, strict=True), color=ACCENT, alpha=0.2, linewidth=0)
    right.set(xlabel="compute C", ylabel="best N", xscale="log", yscale="log")
    for axes in grid[0]:
        axes.grid(color=GRID, linewidth=0.8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(out)
    plt.close(figure)
