"""`regard sweep`: train a recipe with varied settings, each in its own process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_model import DataOption, DeviceOption, RecipeArgument, StartOption

if TYPE_CHECKING:
    from regard.training.sweep import StartProcess, Sweep

VaryOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUES",
        help="Values such as train.lr=1e-3,3e-3, or a range: train.lr=1e-4..1e-2:log, model.width=96..192:48.",
    ),
]
TrialsOption = Annotated[
    int | None, typer.Option(min=1, help="The number of random samples; by default every combination is trained.")
]


def sweep(
    context: typer.Context,
    recipe: RecipeArgument = None,
    start: StartOption = None,
    data: DataOption = None,
    vary: VaryOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The directory; runs/NAME-sweep by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trials that run at the same time; they share the CPU cores.")] = 1,
    trials: TrialsOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the random samples.")] = 0,
    resume: Annotated[Path | None, typer.Option(help="Continue the sweep in this directory.")] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run the trials on a Ray cluster with a shared file system.")
    ] = False,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print sweep.json instead of a table.")] = False,
) -> None:
    """Train a recipe with every combination of some values, or with random samples of them.

    Each trial is an ordinary run in DIR/trial-001, DIR/trial-002 … The same command, or --resume DIR, continues a sweep
    that was interrupted: finished trials are skipped, stopped ones are resumed and failed ones are tried again.

    \b
    Examples:
      regard sweep llama --vary train.lr=1e-3,3e-3 --vary model.width=96,192 --train.steps=200
      regard sweep llama --vary train.lr=1e-4..1e-2:log --trials 8 --seed 1 --jobs 2 --out runs/rates
      regard sweep --from smollm2 --data chats.jsonl --vary adapter.rank=4,16
      regard sweep --resume runs/rates
    """
    from regard.training.sweep import Sweep

    if (recipe is None and start is None) == (resume is None):
        raise typer.BadParameter("give either a recipe, a model to fine-tune (--from MODEL), or --resume DIR")
    if recipe is not None and recipe.startswith("--"):
        raise typer.BadParameter(f"the recipe comes first: regard sweep llama {recipe}")
    if resume is not None:
        if vary or any(value is not None for value in (out, trials, data)) or context.args:
            raise typer.BadParameter("a sweep is resumed with its own settings; give only --resume, --jobs and --ray")
        found = Sweep.open(resume)
    else:
        from regard.training.overrides import parse_overrides
        from regard.training_run import FINE_TUNE, path_overrides

        overrides = parse_overrides(context.args) | path_overrides(start, data)
        found = new_sweep(recipe or FINE_TUNE, vary or [], out, trials, seed, device, overrides)
        found.check()
    run_sweep(found, jobs, ray, as_json)


def new_sweep(
    recipe: str,
    vary: list[str],
    out: Path | None,
    trials: int | None,
    seed: int,
    device: str,
    overrides: dict[str, str],
) -> "Sweep":
    from regard.training.recipe import find_recipe
    from regard.training.sweep import Sweep
    from regard.training.variations import grid, parse_variations, sample

    variations = parse_variations(vary)
    settings = grid(variations) if trials is None else sample(variations, trials, seed)
    path = out or Path("runs") / f"{find_recipe(recipe).stem}-sweep"
    return Sweep.create(path, recipe, overrides, settings, device)


def run_sweep(sweep: "Sweep", jobs: int, ray: bool, as_json: bool) -> None:
    note = stderr_note()
    start = ray_tasks(sweep.device, sweep.folder) if ray else processes(jobs, sweep.folder)
    note(f"{len(sweep.trials)} trials in {sweep.path}, {'on Ray' if ray else f'{jobs} at a time'}")
    completed = sweep.run(start, len(sweep.trials) if ray else jobs, note)
    report(sweep, as_json, note)
    if not completed:
        note(f"stopped; to continue: regard sweep --resume {sweep.path}")
        raise typer.Exit(130)
    raise typer.Exit(0 if all(trial.state == "finished" for trial in sweep.trials) else 1)


def stderr_note() -> "Callable[[str], None]":
    """Prints lines to the error output, so that results can be piped."""
    from rich.console import Console

    console = Console(stderr=True)
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


def report(sweep: "Sweep", as_json: bool, note: Callable[[str], None]) -> None:
    """Print the trials, lowest held-out loss first, and draw sweep.png if matplotlib is installed."""
    from regard.cli.runs import format_loss, print_table

    if as_json:
        print((sweep.path / "sweep.json").read_text(encoding="utf-8"), end="")
    else:
        rows = [
            {
                "trial": trial.name,
                **trial.values,
                "held out": format_loss(trial.held_out_loss),
                "best": format_loss(trial.results.get("best_held_out_loss")),
                "training": format_loss(trial.results.get("loss")),
                "step": f"{trial.results.get('step', 0):,}",
                "state": trial.state,
            }
            for trial in sweep.ranking
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        print_table([{name: row.get(name, "–") for name in names} for row in rows])
        for trial in sweep.trials:
            if trial.error:
                print(f"{trial.name} failed: {trial.error}")
    if find_spec("matplotlib") is None:
        note("no plot: install matplotlib with pip install 'regard[plots]'")
    elif any(trial.held_out_loss is not None for trial in sweep.trials):
        draw(sweep)
        note(f"plot: {sweep.path / 'sweep.png'}")


def draw(sweep: "Sweep") -> None:
    from regard.report.run_plots import sweep_results
    from regard.training.history import read_history

    trials = [trial for trial in sweep.ranking if trial.held_out_loss is not None]
    curves = {}
    for trial in trials:
        history = read_history(sweep.path / trial.name / "metrics.jsonl")
        short = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in trial.values.items())
        curves[short if short not in curves else trial.name] = (history.points, history.evaluations)
    names = dict.fromkeys(name for trial in trials for name in trial.values)
    varied = {
        name: [(trial.values.get(name, "–"), trial.results["held_out_loss"]) for trial in trials] for name in names
    }
    sweep_results(curves, varied, sweep.path / "sweep.png")


def processes(jobs: int, folder: str) -> "StartProcess":
    """Starts each trial as a process in a session of its own, so that Ctrl-C reaches it through the sweep only."""
    from regard.training.sweep import job_environment

    cpus, gpus = len(os.sched_getaffinity(0)), visible_gpus()

    def start(arguments: list[str], output: Path, slot: int) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": python_path()} | job_environment(slot, jobs, cpus, gpus)
        with output.open("ab") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", "regard", *arguments],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    return start


def visible_gpus() -> list[str]:
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]


def python_path() -> str:
    """The search path with which a process imports this very package."""
    source = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))


class RayTask:
    """A trial as a Ray task."""

    def __init__(self, ray: Any, reference: Any):
        self.ray, self.reference = ray, reference

    def poll(self) -> int | None:
        ready, _ = self.ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            return self.ray.get(self.reference)
        except self.ray.exceptions.TaskCancelledError:
            return 130

    def send_signal(self, number: int, /) -> None:
        self.ray.cancel(self.reference)  # raises KeyboardInterrupt in run_command


def ray_tasks(device: str, folder: str) -> "StartProcess":
    """Starts each trial as a Ray task with one CPU, or one GPU if the device is CUDA; Ray decides on which machine."""
    try:
        ray = import_module("ray")
    except ModuleNotFoundError:
        raise ValueError("--ray needs Ray: pip install ray; without --ray the trials run on this machine") from None
    ray.init(ignore_reinit_error=True)
    remote = ray.remote(num_cpus=1, num_gpus=int(device.startswith("cuda")), max_retries=0)(run_command)
    path = python_path()

    def start(arguments: list[str], output: Path, slot: int) -> RayTask:
        return RayTask(ray, remote.remote(arguments, str(output), folder, path))

    return start


def run_command(arguments: list[str], output: str, folder: str, path: str) -> int:
    """Run `regard` with these arguments to its end; an interrupt is passed on, and the run saves its state."""
    environment = os.environ | {"PYTHONPATH": path}
    with open(output, "ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "regard", *arguments], env=environment, cwd=folder, stdout=stream, stderr=stream
        )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait()
