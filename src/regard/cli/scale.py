"""`regard scale`: train a grid of sizes and token counts, and fit a scaling law."""

import json
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_model import DeviceOption, RecipeArgument

if TYPE_CHECKING:
    from regard.planning.scaling import ScalingRun
    from regard.planning.scaling_study import ScalingStudy
    from regard.training.sweep import Process, StartProcess, Sweep

FARTHEST = 10  # times the compute of the largest run, without a warning
POLL_SECONDS = 1.0
SPEED_SECONDS = 300.0  # over which the time left is estimated

SizesOption = Annotated[
    str | None, typer.Option(metavar="SIZES", help="Widths, or WIDTHxLAYERS: 32x2,48x3,64x4. At least three.")
]
TokensOption = Annotated[
    str | None, typer.Option(metavar="COUNTS", help="Training tokens: 100k,200k,400k. At least three.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(metavar="MINUTES", help="Instead of --tokens: choose five counts that take about this time to train."),
]
PowerOption = Annotated[
    float, typer.Option(help="The learning rate of a width is that of the recipe · (recipe's width / width)^POWER.")
]
ComputeOption = Annotated[
    list[float] | None,
    typer.Option(metavar="FLOPS", help="Recommend a size for this compute; by default 1, 10, 100 times the largest."),
]


def scale(
    context: typer.Context,
    recipe: RecipeArgument = None,
    sizes: SizesOption = None,
    tokens: TokensOption = None,
    budget: BudgetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The directory; by default runs/scale, or with --fit none.")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option("--fit", metavar="FILE", help="Fit the results in a JSON or CSV file; train nothing.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the study in this directory.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every size and count, with seeds of their own.")] = 1,
    lr_power: PowerOption = 0.5,
    compute: ComputeOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs that train at the same time; they share the CPU cores.")] = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Train the runs on a Ray cluster with a shared file system.")
    ] = False,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print scaling.json instead of tables.")] = False,
) -> None:
    """Train a grid of model sizes and token counts, and fit L(N, D) = E + A / N^alpha + B / D^beta to the losses.

    Every run is an ordinary run in OUT/trial-001 … with a schedule of its own length. The same command, or --resume
    OUT, continues after an interruption: finished runs are kept, stopped ones are resumed. Then the law, the minima at
    equal compute and the best size for each --compute are printed, with intervals, and written to scaling.json,
    scaling.png, isoflop.png and report.html in OUT. N is the number of parameters without embedding and output layer.

    \b
    Examples:
      regard scale llama --sizes 48x2,96x3,192x6 --tokens 200k,400k,800k --out runs/scale
      regard scale characters --sizes 16x2,24x3,32x4,64x4 --budget 20 --data.rows=8 --jobs 2
      regard scale --resume runs/scale --compute 1e15
      regard scale --fit results.csv --compute 1e21
    """
    if sum(source is not None for source in (recipe, fit, resume)) != 1:
        raise typer.BadParameter("give a recipe, --resume DIR, or --fit FILE")
    if recipe is None:
        if context.args or any(value is not None for value in (sizes, tokens, budget)):
            raise typer.BadParameter("--sizes, --tokens, --budget and overrides belong to a new study with a recipe")
        if resume is not None and out is not None:
            raise typer.BadParameter("--resume names the directory; remove --out")
        unused = ["seeds", "lr_power", "device"] if fit is None else ["seeds", "lr_power", "device", "jobs", "ray"]
        for name in unused:
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
                given = "--resume" if fit is None else "--fit"
                raise typer.BadParameter(f"--{name.replace('_', '-')} has no effect with {given}; leave it out")
    if wrong := [value for value in compute or () if not 0 < value < math.inf]:
        raise ValueError(f"--compute {wrong[0]:g} is not a positive number of FLOPs")
    if fit is not None:
        from regard.planning.scaling_study import read_runs

        report(read_runs(fit), [], out, compute or (), as_json)
        return
    if resume is not None:
        from regard.training.sweep import Sweep

        found = Sweep.open(resume)
        set_titles(found)
    else:
        assert recipe is not None
        found = new_grid(recipe, context.args, sizes, tokens, budget, out, seeds, lr_power, jobs, device)
    train_grid(found, jobs, ray, compute or (), as_json)


def new_grid(
    recipe: str,
    arguments: Sequence[str],
    sizes: str | None,
    tokens: str | None,
    budget: float | None,
    out: Path | None,
    seeds: int,
    power: float,
    jobs: int,
    device: str,
) -> "Sweep":
    from regard.cli.scale_budget import counts_for_budget
    from regard.training.overrides import parse_overrides
    from regard.training.recipe import find_recipe, read_recipe
    from regard.training.scaling_grid import check_sizes, grid_settings, parse_sizes, parse_tokens
    from regard.training.sweep import Sweep

    if sizes is None or (tokens is None) == (budget is None):
        raise typer.BadParameter("give --sizes, and either --tokens or --budget")
    overrides = {"train.evaluate_every": "0"} | parse_overrides(arguments)
    tables, path = read_recipe(find_recipe(recipe), overrides), out or Path("runs/scale")
    chosen = parse_sizes(sizes)
    counts = None if tokens is None else parse_tokens(tokens)
    if len(chosen) < 3 or (counts is not None and len(counts) < 3):
        given = "" if counts is None else f" and {len(counts)} token counts"
        raise ValueError(f"{len(chosen)} sizes{given} cannot determine a law; give at least three of each")
    study = {"sizes": [str(size) for size in chosen], "tokens": counts, "budget": budget, "seeds": seeds}
    study["lr_power"] = power
    if (path / "sweep.json").exists():  # the counts of a budget were chosen already
        found = Sweep.create(path, recipe, overrides, [], device)
        set_titles(found)
        check_same_study(found, study)
    else:
        check_sizes(tables, chosen, power)
        counts = counts or counts_for_budget(tables, chosen, power, budget or 0, seeds, jobs, device)
        found = Sweep.create(path, recipe, overrides, grid_settings(tables, chosen, counts, seeds, power), device)
        found.study = study
        set_titles(found)
    found.check()
    return found


def check_same_study(stored: "Sweep", study: dict[str, Any]) -> None:
    """Raise ValueError if the options of the command are not those of the study in the directory."""

    def given(options: dict[str, Any], name: str) -> str:
        value = options.get(name)
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        return f"no --{name.replace('_', '-')}" if value is None else f"--{name.replace('_', '-')} {text}"

    if not stored.study:
        raise ValueError(
            f"{stored.path} holds a study of an earlier version, without its options; continue it with: regard scale "
            f"--resume {stored.path}, or choose another directory with --out"
        )
    for name, value in study.items():
        if stored.study.get(name) != value:
            raise ValueError(
                f"{stored.path} holds a study with {given(stored.study, name)}, not with {given(study, name)}; "
                f"continue it with: regard scale --resume {stored.path}, or choose another directory with --out"
            )


def set_titles(sweep: "Sweep") -> None:
    """Name the runs by their size, tokens and learning rate. ValueError if the sweep is no scaling study."""
    from regard.training.scaling_grid import run_title

    if any(not {"train.steps", "train.seed", "model.width"} <= trial.values.keys() for trial in sweep.trials):
        raise ValueError(
            f"{sweep.path} holds a sweep, not a scaling study; continue it with: regard sweep --resume {sweep.path}"
        )
    several = len({trial.values["train.seed"] for trial in sweep.trials}) > 1
    for trial in sweep.trials:
        trial.title = run_title(sweep.tables, trial.values, several)


def train_grid(sweep: "Sweep", jobs: int, ray: bool, compute: Sequence[float], as_json: bool) -> None:
    from regard.cli.sweep import processes, ray_tasks, stderr_note

    start = ray_tasks(sweep.device, sweep.folder) if ray else processes(jobs, sweep.folder)
    with progress_bar(sweep) as (watch, note):
        note(f"{len(sweep.trials)} runs in {sweep.path}, {'on Ray' if ray else f'{jobs} at a time'}")
        completed = sweep.run(watch(start), len(sweep.trials) if ray else jobs, note)
    note = stderr_note()
    if not completed:
        note(f"stopped; to continue: regard scale --resume {sweep.path}")
        raise typer.Exit(130)
    for trial in sweep.trials:
        if trial.error:
            note(f"{trial.name} failed and is left out of the fit: {trial.error}")
    runs, rows = finished_runs(sweep)
    report(runs, rows, sweep.path, compute, as_json)
    raise typer.Exit(0 if all(trial.state == "finished" for trial in sweep.trials) else 1)


@contextmanager
def progress_bar(sweep: "Sweep") -> "Generator[tuple[Callable[[StartProcess], StartProcess], Callable[[str], None]]]":
    """A bar of the steps of all runs, weighted by the parameters; it is moved whenever a process is polled."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from regard.training.history import read_history

    works = {trial.name: work(trial.values) for trial in sweep.trials}
    times = (TextColumn("elapsed"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), *times)
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=SPEED_SECONDS) as bar:
        task, last = bar.add_task("training", total=sum(works.values())), [0.0]

        def update() -> None:
            if time.monotonic() - last[0] < POLL_SECONDS:
                return
            last[0] = time.monotonic()
            done = 0.0
            for trial in sweep.trials:
                share = float(trial.state == "finished")
                if trial.state == "running":
                    step = read_history(sweep.path / trial.name / "metrics.jsonl", 0).step
                    share = min(1.0, step / int(trial.values["train.steps"]))
                done += share * works[trial.name]
            finished = sum(trial.state == "finished" for trial in sweep.trials)
            bar.update(task, completed=done, description=f"run {min(finished + 1, len(works))} of {len(works)}")

        def watch(start: "StartProcess") -> "StartProcess":
            return lambda arguments, output, slot: WatchedProcess(start(arguments, output, slot), update)

        yield watch, lambda text: bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        last[0] = 0.0
        update()


class WatchedProcess:
    """A process that calls `update` whenever it is polled."""

    def __init__(self, process: "Process", update: "Callable[[], None]"):
        self.process, self.update = process, update

    def poll(self) -> int | None:
        self.update()
        return self.process.poll()

    def send_signal(self, number: int, /) -> None:
        self.process.send_signal(number)


def work(values: dict[str, str]) -> float:
    """The work of a run, for the bar: its steps times the square of its width times its layers."""
    layers = int(values.get("model.layers.0.times", "1"))
    return int(values["train.steps"]) * int(values["model.width"]) ** 2 * layers


def finished_runs(sweep: "Sweep") -> "tuple[list[ScalingRun], list[dict[str, Any]]]":
    """The finished runs, and their rows for tables and scaling.json."""
    from dataclasses import asdict

    from regard.planning import plan
    from regard.planning.parameters import non_embedding_parameters
    from regard.planning.scaling import ScalingRun
    from regard.training.recipe import Recipe
    from regard.training.run_summary import read_config

    runs, rows = [], []
    for trial in sweep.trials:
        if trial.state != "finished" or trial.held_out_loss is None:
            continue
        recipe = Recipe.from_dict(read_config(sweep.path / trial.name))
        planned = plan(recipe.model, context=recipe.data.length, batch=recipe.data.rows)
        tokens = trial.results["tokens"]
        size, flops = non_embedding_parameters(planned.count), planned.training_flops * tokens
        runs.append(ScalingRun(size, tokens, trial.held_out_loss, flops))
        more = {"all_parameters": planned.parameters, "lr": recipe.train.lr, "steps": recipe.train.steps}
        rows.append({**asdict(runs[-1]), **more, "seed": recipe.train.seed, "run": trial.name})
    return runs, rows


def report(
    runs: "Sequence[ScalingRun]",
    rows: list[dict[str, Any]],
    out: Path | None,
    compute: Sequence[float],
    as_json: bool,
) -> None:
    """Fit, print and write the study. rows: more about the runs."""
    from dataclasses import asdict

    from rich.console import Console

    from regard.checkpoint.atomic_folder import write_file
    from regard.cli.sweep import stderr_note
    from regard.planning.scaling import flops_6nd
    from regard.planning.scaling_study import study

    with Console(stderr=True).status("fit"):
        found = study(runs, compute)
    largest = max(flops_6nd(run.parameters, run.tokens) for run in runs)
    if compute and max(compute) > FARTHEST * largest:
        times = f"{max(compute) / largest:.3g} times that of the largest run"
        stderr_note()(f"--compute {max(compute):g} is {times}; the intervals omit the error of extrapolation")
    data = {"runs": rows or [asdict(run) for run in runs], **found.to_dict()}
    text = json.dumps(data, indent=2) + "\n"
    print(text if as_json else "\n\n".join(tables(data, found)), end="" if as_json else "\n")
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "scaling.json", text.encode())
    if find_spec("matplotlib") is None:
        stderr_note()("no plots and no report: install matplotlib with pip install 'regard[plots]'")
        return
    from regard.report.scaling_page import draw_isoflops, draw_law, write_page

    draw_law(found, out / "scaling.png")
    draw_isoflops(found, out / "isoflop.png")
    write_page(found, out)
    stderr_note()(f"report: {out / 'report.html'}")


def tables(data: dict[str, Any], found: "ScalingStudy") -> list[str]:
    """The runs, the law and the optima as tables of text."""
    from regard.report.scaling_page import exponent_rows, law_text, optimum_rows

    runs = [
        {"N": f"{run['parameters']:,.0f}", "D": f"{run['tokens']:,.0f}", "counted FLOPs": f"{run['flops']:.3g}",
         "held out": f"{run['loss']:.4f}", "law": f"{found.fit.law.loss(run['parameters'], run['tokens']):.4f}"}
        for run in data["runs"]
    ]  # fmt: skip
    return [grid_text(runs), law_text(found), grid_text(exponent_rows(found)), grid_text(optimum_rows(found))]


def grid_text(rows: Sequence[dict[str, str]]) -> str:
    """Aligned columns with a header."""
    lines = [list(rows[0]), *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
