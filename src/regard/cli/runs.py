"""`regard runs`, `regard runs show` and `regard runs compare`: list runs, plot one, compare several."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from regard.training.history import CurvePoint
    from regard.training.run_summary import RunSummary

MAX_POINTS = 1000
COMPARED_POINTS = 8  # rows of the table of losses
MAX_TEXT = 40  # characters of a value of a recipe
NONE = "–"
STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow", "damaged": "red"}
By = Literal["tokens", "steps"]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN…", help="The directories of the runs.")]


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR…]", help="Runs, or folders to search for runs; by default runs/."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List runs: model, data, steps, losses, speed and state.

    A run is finished, stopped (it can be resumed), running, or damaged.

    \b
    Examples:
      regard runs
      regard runs runs/sweep --json
      regard runs show runs/mine
      regard runs compare runs/mine runs/other
    """
    from regard.training.run_summary import find_runs, summarize_run

    for folder in folders or ():
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give a run, or a folder that holds runs")
    summaries = [with_parameters(summarize_run(path)) for path in find_runs(folders or [Path("runs")])]
    if as_json:
        print(json.dumps([summary.to_dict() for summary in summaries], indent=2))
    elif summaries:
        print_table([overview(summary) for summary in summaries])
        print_problems(summaries)
    else:
        searched = ", ".join(map(str, folders or ["runs"]))
        print(f"no runs in {searched}; start one with: regard train llama --out runs/mine")


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of the run.")],
    by: Annotated[By, typer.Option(help="The horizontal axis of the plot.")] = "steps",
    as_json: JsonOption = False,
) -> None:
    """Show one run with its loss curve: dots are the training loss, circles the held-out loss.

    \b
    Examples:
      regard runs show runs/mine
      regard runs show runs/mine --by tokens --json
    """
    from regard.report.terminal import text_plot

    summary = open_run(run)
    history = summary.history
    if as_json:
        curves = {"points": rows_of(history.points), "evaluations": rows_of(history.evaluations)}
        print(json.dumps({**summary.to_dict(), **curves, "config": summary.config}, indent=2))
        return
    entries = {**overview(summary), "tokens": f"{history.tokens:,}", "best": format_best(summary)}
    width = max(map(len, entries))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in entries.items()))
    print_problems([summary])
    curve, markers = ([(position(point, by), point.loss) for point in points] for points in curves_of(summary))
    if lines := text_plot(curve, markers):
        print("\n" + "\n".join(lines) + f"\n{by}; dots: training loss, ●: held-out loss")
    if summary.state == "stopped":
        print(f"\nto continue: regard train --resume {run}")


def compare(
    paths: RunsArgument,
    by: Annotated[By, typer.Option(help="Compare at equal numbers of tokens or steps.")] = "tokens",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the loss curves into a .png or .svg file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: losses at equal tokens or steps, and the values in which their recipes differ.

    \b
    Examples:
      regard runs compare runs/mine runs/other
      regard runs compare runs/sweep/trial-* --by steps --plot losses.png
    """
    from regard.training.run_summary import differing_values

    if len(paths) < 2:
        raise typer.BadParameter("give at least two runs")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot {plot} is neither a .png nor a .svg file; choose one of the two")
    summaries = [open_run(path) for path in paths]
    names = short_names(paths)
    losses = losses_at_equal_positions(summaries, by)
    differences = differing_values([summary.config for summary in summaries])
    if plot is not None:
        from regard.report.run_plots import run_curves

        run_curves(dict(zip(names, map(curves_of, summaries), strict=True)), plot, by)
    if as_json:
        data = [summary.to_dict() for summary in summaries]
        print(json.dumps({"runs": data, "losses": losses, "recipes": differences}, indent=2))
        return
    print_table([overview(summary) for summary in summaries])
    print_problems(summaries)
    print_table(
        [{by: f"{row[by]:,}", **dict(zip(names, map(format_pair, row["runs"]), strict=True))} for row in losses],
        title=f"training loss / last held-out loss, at equal {by}",
    )
    print_table(
        [{"recipe": key, **dict(zip(names, map(format_value, row), strict=True))} for key, row in differences.items()],
        title="differences of the recipes" if differences else "the recipes are the same",
    )
    if plot is not None:
        print(f"plot: {plot}")


def open_run(path: Path) -> "RunSummary":
    from regard.training.run_summary import is_run, summarize_run

    if not is_run(path):
        raise ValueError(f"{path} holds no run; `regard runs DIR` lists the runs below a folder")
    return with_parameters(summarize_run(path, MAX_POINTS))


def with_parameters(summary: "RunSummary") -> "RunSummary":
    """Before the first checkpoint, the parameters are counted from the spec."""
    from dataclasses import replace

    spec = summary.config.get("model")
    if summary.parameters is not None or not isinstance(spec, Mapping):
        return summary
    from regard.models.base import Model
    from regard.planning.parameters import count_parameters
    from regard.spec import SpecError, parse_spec

    try:
        model = parse_spec(spec, "model", Model)
    except SpecError:  # for example a part that another package registers
        return summary
    return replace(summary, parameters=count_parameters(model).total) if isinstance(model, Model) else summary


def overview(summary: "RunSummary") -> dict[str, str]:
    """The columns of the list of runs."""
    data = summary.to_dict()
    adapter = ", adapter" if summary.config.get("adapter") else ""
    size = adapter if summary.parameters is None else f"{adapter} {summary.parameters / 1e6:,.2f} M"
    return {
        "run": data["run"],
        "state": data["state"],
        "model": f"{data['model']}{size}",
        "trained on": f"{data['objective']}: {data['data']}",
        "steps": f"{data['step']:,}/{data['steps']:,}" if isinstance(data["steps"], int) else f"{data['step']:,}",
        "held out": format_loss(data["held_out_loss"]),
        "best": format_loss(data["best_held_out_loss"]),
        "tokens/s": NONE if data["tokens_per_second"] is None else f"{data['tokens_per_second']:,.0f}",
        "changed": format_age(time.time() - data["changed"]),
    }


def print_table(rows: Sequence[Mapping[str, str]], title: str | None = None) -> None:
    """Print rows that have the same columns. In a pipe, lines are not broken."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in rows[0] if rows else ():
        number = all(row[name][:1].isdigit() or row[name] == NONE for row in rows)
        table.add_column(name, overflow="fold", no_wrap=number, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(value, style=STYLES.get(value, "")) for value in row.values()))
    console = Console()
    if title is not None:
        console.print(f"\n{title}", style="bold", soft_wrap=True)
    if rows:
        (console if console.is_terminal else Console(width=10_000)).print(table)


def print_problems(summaries: "Sequence[RunSummary]") -> None:
    for summary in summaries:
        for problem in summary.problems:
            print(f"{summary.path}: {problem}")


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last components of the paths, or the whole paths if these are not unique."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


def curves_of(summary: "RunSummary") -> "tuple[list[CurvePoint], list[CurvePoint]]":
    return summary.history.points, summary.history.evaluations


def rows_of(points: "Sequence[CurvePoint]") -> list[dict[str, float]]:
    return [{"step": point.step, "tokens": point.tokens, "loss": point.loss} for point in points]


def position(point: "CurvePoint", by: By) -> int:
    return point.tokens if by == "tokens" else point.step


def losses_at_equal_positions(summaries: "Sequence[RunSummary]", by: By) -> list[dict[str, Any]]:
    """Rows of {by: position, "runs": [{"loss", "held_out_loss"} of each run]}, at steps of the shortest run."""
    curves = [curves_of(summary) for summary in summaries]
    if not all(points for points, _ in curves):
        return []
    shortest = [position(p, by) for p in min((points for points, _ in curves), key=lambda c: position(c[-1], by))]
    count = min(COMPARED_POINTS, len(shortest))
    marks = [shortest[len(shortest) * (i + 1) // count - 1] for i in range(count)]
    return [
        {
            by: mark,
            "runs": [
                {"loss": latest(points, mark, by), "held_out_loss": latest(evaluations, mark, by)}
                for points, evaluations in curves
            ],
        }
        for mark in marks
    ]


def latest(points: "Sequence[CurvePoint]", mark: int, by: By) -> float | None:
    """The last loss at or before a position."""
    return next((point.loss for point in reversed(points) if position(point, by) <= mark), None)


def format_loss(loss: float | None) -> str:
    return NONE if loss is None else f"{loss:.4f}"


def format_pair(pair: Mapping[str, float | None]) -> str:
    return f"{format_loss(pair['loss'])} / {format_loss(pair['held_out_loss'])}"


def format_best(summary: "RunSummary") -> str:
    best = summary.history.best
    return NONE if best is None else f"{best.loss:.4f} at step {best.step:,}"


def format_value(value: object) -> str:
    """A value of a recipe in one short line: a part as `kind(value, …)`, a list of parts by their kinds."""
    if value is None or isinstance(value, str):
        return value or NONE
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        text = f"[{', '.join(kind_of(entry) for entry in value)}]"
    elif isinstance(value, Mapping) and "kind" in value:
        fields = [f"{k}={v}" for k, v in value.items() if k != "kind" and not isinstance(v, Mapping | list)]
        text = f"{value['kind']}({', '.join(fields)})"
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def kind_of(part: Mapping[str, Any]) -> str:
    """The kind of a part; of a sublayer that of its body."""
    return str(table.get("kind", "{}")) if isinstance(table := part.get("body", part), Mapping) else "{}"


def format_age(seconds: float) -> str:
    """4000 -> '1.1 h ago'"""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
