"""A pipeline: phases of training, each an ordinary run that may start from an earlier one.

    [[phases]]
    name = "sft"                # the run's directory is OUT/seed-0/sft
    recipe = "finetune"         # whose values this phase changes; any table of a recipe may follow
    from = "pretrain"           # an earlier phase, or a model
    full = true                 # train all weights, also if the recipe has an adapter

The same call goes on after an interruption: finished phases are skipped, and one that was started is resumed.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from regard.objectives.base import Objective
from regard.objectives.distillation import Distillation
from regard.objectives.reinforcement import Reinforcement
from regard.planning import plan
from regard.spec import SpecError, require, suggest_name
from regard.training.history import parse_line
from regard.training.loop import TrainingResult
from regard.training.recipe import Recipe, find_recipe, read_recipe, resolve
from regard.training.run import Run, step_of
from regard.training_run import resume_run, start_run

PIPELINES = Path(__file__).parent / "pipelines"
PHASES = {"objective": ("reward", "teacher")}  # fields that may name an earlier phase, beside `from`


@dataclass(frozen=True)
class Phase:
    name: str
    tables: Mapping[str, Any]  # of its recipe; `from` may be the name of an earlier phase

    def resolved_tables(self, folder: Path, earlier: Sequence[str], seed: int) -> dict[str, Any]:
        """The tables of the recipe for a seed, with the directories of earlier phases."""
        tables = merge(self.tables, {"train": {"seed": seed}, "data": {"seed": seed}})
        if tables.get("from") in earlier:
            tables["from"] = str(folder / tables["from"])
        for table, fields in PHASES.items():
            for field in fields:
                if tables.get(table, {}).get(field) in earlier:
                    tables[table] = {**tables[table], field: str(folder / tables[table][field])}
        return tables


def read_pipeline(name: str | Path) -> list[Phase]:
    """The phases of a TOML file, or of the package's pipeline of this name."""
    path, packaged = Path(name), PIPELINES / f"{name}.toml"
    if not path.is_file():
        names = [file.stem for file in PIPELINES.glob("*.toml")]
        require(
            packaged.is_file(), f"there is no pipeline {name}; use a TOML file, or {suggest_name(str(name), names)}"
        )
        path = packaged
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("phases")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    require(isinstance(entries, list) and len(entries) > 0, f"{path} has no [[phases]]; add one per phase")
    assert isinstance(entries, list)
    phases: list[Phase] = []
    for entry in entries:
        phases.append(read_phase(entry, [phase.name for phase in phases], path))
    return phases


def read_phase(entry: Mapping[str, Any], earlier: Sequence[str], path: Path) -> Phase:
    name, entry = entry.get("name"), dict(entry)
    valid = isinstance(name, str) and name.replace("-", "").replace("_", "").isalnum()
    require(valid, f"{path}: a phase needs a `name` of letters, digits, - and _; found {name!r:.40}")
    assert isinstance(name, str)
    require(name not in earlier, f"{path}: two phases have the name {name}; rename one")
    recipe, full = entry.pop("recipe", None), entry.pop("full", False)
    changes = {key: value for key, value in entry.items() if key != "name"}
    tables = merge({} if recipe is None else read_recipe(find_recipe(recipe)), changes)
    if full:
        tables.pop("adapter", None)
    return Phase(name, tables)


def merge(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the changed values; tables inside of tables are merged too."""
    merged = dict(tables)
    for name, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = merge(merged[name], value) if both else value
    return merged


def run_pipeline(
    phases: Sequence[Phase],
    out: Path,
    seed: int = 0,
    device: str = "auto",
    console: Console | None = None,
    on_phase: Callable[[Path], None] = lambda path: None,
) -> TrainingResult | None:
    """Run the phases that are not finished. `on_phase` is called with the directory of each after it. Returns the
    result of one that was stopped by a signal, and None if all are finished."""
    console, folder, names = console or Console(stderr=True), out / f"seed-{seed}", []
    for phase in phases:
        path = folder / phase.name
        if not is_finished(path):
            if (path / "config.json").is_file():
                result = resume_run(path, device, console)
            else:
                tables = phase.resolved_tables(folder, names, seed)
                result = start_run(path, resolve(tables), device, console)
            if not result.finished:
                return result
        names.append(phase.name)
        on_phase(path)
    return None


def is_finished(path: Path) -> bool:
    if not (path / "config.json").is_file():
        return False
    run = Run.open(path)
    steps = Recipe.from_dict(run.config).train.steps
    return any(step_of(checkpoint) >= steps for checkpoint in run.checkpoints)


@dataclass(frozen=True)
class PhaseCost:
    tokens: int  # that the run was trained on
    flops: float  # of training and of the forward passes for sampling, references, teachers and reward models
    seconds: float


def describe_phase(path: Path) -> dict[str, Any]:
    """The name of a phase, the earlier phase or model that it started from, and its objective."""
    config = Run.open(path).config
    start, folder = config.get("from"), path.absolute().parent
    if start is not None and folder in Path(start).parents:
        start = Path(start).relative_to(folder).parts[0]
    return {"phase": path.name, "from": start, "objective": config["objective"]["kind"]}


def phase_cost(path: Path) -> PhaseCost:
    recipe, records = Recipe.from_dict(Run.open(path).config), read_records(path)
    tokens = max((record["tokens"] for record in records if "tokens" in record), default=0)
    seconds = sum(record.get("seconds", 0.0) for record in records)
    costs = plan(recipe.model, context=recipe.data.length)
    per_token = costs.training_flops + further_forwards(recipe.objective) * costs.forward_flops
    return PhaseCost(tokens, per_token * tokens, seconds)


def further_forwards(objective: Objective | None) -> float:
    """Forward passes without gradient, per token of training.

    Reinforcement learning samples, computes the old log-probabilities, and may need those of a reference or a reward
    model; `epochs` passes share these. Sampling is counted as a forward over prompt and completion, as if no prompt
    were shared. A teacher or reward model is counted as if it had the size of the model that is trained.
    """
    if isinstance(objective, Reinforcement):
        return (2 + (objective.kl > 0) + Path(objective.reward).is_dir()) / objective.epochs
    return float(isinstance(objective, Distillation) or (objective is not None and objective.needs_reference))


METRICS = ("tokens", "flops", "seconds", "correct", "formatted", "both", "score", "win_rate", "accuracy")


def summarize(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A record per phase: of each metric the mean over the seeds with its smallest and largest value, and the phase's
    share of all FLOPs."""
    total, phases = sum(result["flops"] for result in results), []
    for name in dict.fromkeys(result["phase"] for result in results):
        rows = [result for result in results if result["phase"] == name]
        phase = {key: rows[0][key] for key in ("phase", "from", "objective")}
        for metric in METRICS:
            if values := [row[metric] for row in rows if metric in row]:
                phase[metric] = {"mean": fmean(values), "low": min(values), "high": max(values)}
        phases.append(phase | {"share": sum(row["flops"] for row in rows) / total})
    return phases


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are complete."""
    lines = (path / "metrics.jsonl").read_bytes().splitlines()
    return [record for line in lines if (record := parse_line(line)) is not None]
