"""A pipeline: phases of training, each an ordinary run that may start from an earlier one.

    [[phases]]
    name = "sft"                # the run's directory is OUT/seed-0/sft
    recipe = "finetune"         # whose values this phase changes; any table of a recipe may follow
    from = "pretrain"           # an earlier phase, or a model
    full = true                 # train all weights and no adapter, as `regard tune --full` does

The same call goes on after an interruption: finished phases are skipped, and one that was started is resumed. The
tables of a phase are kept in OUT/seed-0/NAME.json; after a change of the pipeline's file the phase is refused.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from regard.checkpoint.atomic_folder import write_file
from regard.models.base import Model
from regard.spec import SpecError, require, suggest_name
from regard.training.data_settings import read_data_table
from regard.training.loop import TrainingResult
from regard.training.new_head import with_new_head
from regard.training.recipe import (
    Recipe,
    build_recipe,
    draft_recipe,
    find_recipe,
    read_recipe,
    resolve,
    train_all_weights,
)
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
    check_phases(phases, path)
    return phases


def check_phases(phases: Sequence[Phase], path: Path) -> None:
    """Find the mistakes of later phases before the first one is trained."""
    models: dict[str, Model] = {}
    for phase in phases:
        tables = dict(phase.tables)
        try:
            if tables.get("from") in models:
                head, model = tables.pop("head", None), models[tables.pop("from")]
                tables["model"] = model.to_dict() if head is None else with_new_head(model, head)
                tables["data"] = read_data_table(tables.get("data", {}))
                models[phase.name] = build_recipe(tables, vocab=1).model
            else:
                models[phase.name] = draft_recipe(tables)[0].model
        except ValueError as error:
            raise SpecError(f"{path}, phase {phase.name}: {error}") from error


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
        require("adapter" not in changes, f"{path}: phase {name} has both full = true and an adapter; remove one")
        tables = train_all_weights(tables, keep_rate="lr" in changes.get("train", {}))
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
    for number, phase in enumerate(phases, 1):
        path = folder / phase.name
        keep_tables(phase, path)
        console.print(f"phase {number} of {len(phases)}: {phase.name}, seed {seed}", highlight=False)
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


def keep_tables(phase: Phase, path: Path) -> None:
    """Write the tables of a phase beside its run, or compare them with those that it was started with."""
    kept = path.with_suffix(".json")
    if not (path / "config.json").is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(kept, json.dumps(phase.tables, indent=2).encode())
    elif kept.is_file() and json.loads(kept.read_bytes()) != json.loads(json.dumps(phase.tables)):
        raise ValueError(
            f"{path} was trained with other settings, which are in {kept}; remove it, or use another --out"
        )


def is_finished(path: Path) -> bool:
    if not (path / "config.json").is_file():
        return False
    run = Run.open(path)
    steps = Recipe.from_dict(run.config).train.steps
    return any(step_of(checkpoint) >= steps for checkpoint in run.checkpoints)
