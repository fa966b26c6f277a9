"""The report of a long-context evaluation: a heat map per task and the accuracy by length; long.json, PNG and HTML."""

import json
from importlib.util import find_spec
from pathlib import Path

from regard.checkpoint.atomic_folder import write_file
from regard.evals.long_context import LongReport
from regard.report.page import Page
from regard.report.plots import ACCENT, GRID, pyplot


def write_long_report(report: LongReport, model: str, out: Path) -> None:
    """Write the files into a folder; without matplotlib no picture."""
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "long.json", json.dumps(report.to_json(), indent=2).encode())
    page = Page(f"How {model} uses a long context")
    effective = report.effective_length
    page.text("no effective length" if effective is None else f"{effective:,} tokens", "big")
    page.text(f"{report.verdict}.")
    if find_spec("matplotlib") is None:
        page.text("No plot: matplotlib is not installed (pip install 'regard[plots]').")
    else:
        draw_maps(report, out / "heat-maps.png")
        page.picture(out / "heat-maps.png", "Accuracy by the depth of what is asked for, and the length of the prompt")
    page.table(
        ("task", *(f"{length:,}" for length in report.lengths)),
        [([task, *(f"{report.accuracy(length, task):.0%}" for length in report.lengths)], "") for task in report.tasks],
    )
    page.write(out / "report.html")


def draw_maps(report: LongReport, out: Path) -> None:
    """A panel per task: depth downwards, length to the right, from white (never right) to blue (always)."""
    plt = pyplot()
    width = max(2.2, 0.55 * len(report.lengths))
    heights = [len(report.depths(task)) for task in report.tasks]
    figure, panels = plt.subplots(
        1, len(heights), figsize=(1.2 + (width + 0.4) * len(heights), 1.2 + 0.42 * max(heights)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, task in zip(panels[0], report.tasks, strict=True):
        depths = report.depths(task)
        shares = [
            [report.select(task=task, length=n, depth=depth)[0].accuracy for n in report.lengths] for depth in depths
        ]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for row, values in enumerate(shares):
            for column, share in enumerate(values):
                colour = "white" if share > 0.6 else ACCENT
                axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
        labels = ["any" if depth is None else f"{depth:.0%}" for depth in depths]
        axes.set_yticks(range(len(depths)), labels=labels, fontsize=8)
        lengths = [f"{length:,}" for length in report.lengths]
        axes.set_xticks(range(len(lengths)), labels=lengths, rotation=45, fontsize=8)
        axes.set(title=task, xlabel="tokens")
        for spine in axes.spines.values():
            spine.set(visible=True, color=GRID)
    panels[0][0].set_ylabel("depth")
    figure.savefig(out)
    plt.close(figure)
