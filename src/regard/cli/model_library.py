"""The models that a server can load while it runs, and what can be computed about them: plan and verify.

They are those that `regard models` lists (installed packages, ./runs and ./models), the runs that the server shows and
those that it was started with. A client names one of them and never a path.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.open_served import NamedModel, open_served
from regard.cli.served_runs import ServedRuns, readable
from regard.find_model import DEFAULT_FOLDERS, PACKAGED, kind_of_model

if TYPE_CHECKING:
    from rich.console import Console

    from regard.cli.open_engine import EngineOptions
    from regard.models.base import Model
    from regard.server.served_model import ServedModel

FLOAT32_BYTES, FLOAT64_BYTES = 4, 8
LARGEST = 10  # trillion parameters; counting takes longer with the number of layers


@dataclass(frozen=True)
class StoredModel:
    """`model` is its name for clients, `run` its name among the runs that the server shows."""

    model: str
    what: str
    path: Path | None  # None: not installed
    remedy: str | None = None
    run: str | None = None

    @property
    def installed(self) -> Path:
        """Its path; ValueError if it is not installed."""
        if self.path is None:
            raise ValueError(f"{self.model} is not installed; install it with: {self.remedy}")
        return self.path


@dataclass(frozen=True)
class ModelSize:
    parameters: int
    bytes: int  # of the weights, as stored
    context: int | None


class ModelLibrary:
    """Methods raise LookupError for a model that is not listed, and ValueError for what cannot be done."""

    def __init__(self, named: Collection[NamedModel], options: "EngineOptions", runs: ServedRuns, console: "Console"):
        self.named, self.runs, self.console = list(named), runs, console
        self.options = options._replace(adapter=None)  # which is for the first model
        self._opened: dict[str, Path] = {}  # the folder or file of each served model, by its name
        self._sizes: dict[tuple[Path, int], ModelSize | str] = {}
        for name, path in named:
            self._opened[name] = weights_of(StoredModel(name, "", self.located(path)))

    def located(self, path: Path) -> Path:
        from regard.find_model import locate

        return locate(path)

    def stored(self) -> dict[str, StoredModel]:
        found: dict[Path, StoredModel] = {}
        entries = [*self.served_runs(), *folder_models(), *packaged_models(), *self.given_models()]
        for entry in entries:
            if readable(entry.model) != entry.model:  # a folder's name is not UTF-8: no request could name it
                continue
            key = entry.path.resolve() if entry.path is not None else Path(entry.model)
            found.setdefault(key, entry)  # a folder that several of them name is listed once
        named: dict[str, StoredModel] = {}
        for entry in found.values():
            if entry.model in named and entry.path is not None:  # another folder of the same name
                entry = replace(entry, model=longer_name(entry.path, named))
            named.setdefault(entry.model, entry)
        return named

    def served_runs(self) -> Iterator[StoredModel]:
        for path in self.runs.paths():
            name = self.runs.name_of(path)
            yield StoredModel(f"{self.runs.folder.name}/{name}", "a run", path, run=name)

    def given_models(self) -> Iterator[StoredModel]:
        """Those that the server was started with."""
        for name, path in self.named:
            located = self.located(path)
            yield StoredModel(name, kind_of_model(located) or "a model", located)

    def find(self, model: str) -> StoredModel:
        entry = self.stored().get(model)
        if entry is None:
            raise LookupError(f"there is no model {model!r:.100} to load; GET /regard/models lists them")
        return entry

    def available(self, served: Collection[str]) -> list[dict[str, Any]]:
        """served: the names of the models that the server has now."""
        return [self.describe(entry, served) for entry in self.stored().values()]

    def describe(self, entry: StoredModel, served: Collection[str]) -> dict[str, Any]:
        size, problem, name = None, None, None
        if entry.path is not None:
            try:
                weights = weights_of(entry)
                size = self.size(weights)
                name = next((name for name in served if self._opened.get(name) == weights), None)
            except (ValueError, OSError) as error:
                problem = str(error)
        return {
            "model": entry.model,
            "what": entry.what,
            "run": entry.run,
            "installed": entry.path is not None,
            "remedy": entry.remedy,
            "parameters": size.parameters if size else None,
            "bytes": size.bytes if size else None,
            "context": size.context if size else None,
            "served_as": name,
            "problem": problem,
        }

    def size(self, weights: Path) -> ModelSize:
        key = weights, weights.stat().st_mtime_ns
        if key not in self._sizes:
            try:
                self._sizes[key] = read_size(weights)
            except (ValueError, OSError, RuntimeError) as error:
                self._sizes[key] = str(error) or "it cannot be read"
        found = self._sizes[key]
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def open(self, model: str, taken: Collection[str]) -> "ServedModel":
        """Load a model with an engine of its own. taken: names of models that the server has."""
        entry = self.find(model)
        weights = weights_of(entry)
        self.check_memory(model, self.size(weights))
        name = free_name(entry, weights, taken)
        served = open_served([NamedModel(name, entry.installed)], self.console, self.options)[0]
        self._opened[name] = weights
        return served

    def check_memory(self, model: str, size: ModelSize, parameter_bytes: int = 0) -> None:
        """Raise ValueError if the weights do not fit into what is free. parameter_bytes: those of each as it is used,
        0 for the dtype that is served."""
        from regard.compat import resolve_device
        from regard.planning.groups import format_number

        free = free_memory(resolve_device(self.options.device))
        on_gpu = free is not None and str(resolve_device(self.options.device)).startswith("cuda")
        least = parameter_bytes or (0 if on_gpu else FLOAT32_BYTES)
        needed = max(size.bytes, least * size.parameters)
        if free is not None and needed > free:
            raise ValueError(
                f"the weights of {model} need {format_number(needed, 'B')} of memory, and {format_number(free, 'B')} "
                "are free; unload a model first"
            )

    def choices(self) -> dict[str, list[str]]:
        """What plan and verify know beside the stored models."""
        from regard.planning.memory import FORMATS
        from regard.planning.published import PUBLISHED
        from regard.planning.speed import DEVICES
        from regard.training.recipe import RECIPES

        return {
            "recipes": sorted(recipe.stem for recipe in RECIPES.glob("*.toml") if has_model(recipe)),
            "published": list(PUBLISHED),
            "devices": list(DEVICES),
            "dtypes": list(FORMATS),
        }

    def plan(
        self, model: str, context: int | None, batch: int, dtype: str, weights: str | None, device: str | None
    ) -> dict[str, Any]:
        """The table of `regard plan`."""
        from regard.cli.plan import run_groups, stored_formats
        from regard.planning import plan
        from regard.planning.groups import rows

        spec, entry = self.spec(model), self.stored().get(model)
        formats = stored_formats(str(entry.path), spec) if entry is not None and entry.path is not None else {}
        numbers = plan(spec, context, batch, dtype, weights, formats)
        groups = numbers.to_dict() | run_groups(model, numbers, None, device)
        return {"model": model, "conditions": numbers.conditions, "rows": [list(row) for row in rows(groups)]}

    def spec(self, model: str) -> "Model":
        from regard.cli.plan import find_spec
        from regard.planning.published import PUBLISHED, UNITS

        entry = self.stored().get(model)
        if entry is not None and entry.path is not None:
            return find_spec(str(entry.path))
        if size := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([MBT])", model):
            if float(size[1]) * UNITS[size[2]] > LARGEST * UNITS["T"]:
                raise ValueError(f"{model:.20} is too large to count here; give at most {LARGEST}T")
        elif model not in self.choices()["recipes"] and model not in PUBLISHED:
            raise LookupError(f"there is no model {model!r:.100}; use a listed one, or a size such as 7B")
        return find_spec(model)

    def verify(self, model: str, on_law: Callable[[str, str, int], None]) -> dict[str, Any]:
        """The table of `regard verify`. on_law: called with (law, dtype, number of laws) before each is tested."""
        from regard.cli.verify import load_or_build
        from regard.verification.report import count_laws, row, verify

        entry = self.stored().get(model)
        if entry is None and model not in self.choices()["recipes"]:
            raise LookupError(f"there is no model {model!r:.100}; use a listed one, or a recipe")
        if entry is not None:  # the laws are tested in float64
            self.check_memory(model, self.size(weights_of(entry)), FLOAT64_BYTES)
        name = model if entry is None else str(entry.path)
        module = load_or_build(name, [], None, 0, self.options.device)
        total = count_laws(module)
        report = verify(module, on_law=lambda law, dtype: on_law(law, dtype, total))
        untested = [
            f"{mask} masks nothing in {report.length} tokens; a length of {needed} would test it"
            for mask, needed in report.untested_masks.items()
        ]
        rows = [list(row(verdict)) for verdict in report.verdicts]
        return {"model": model, "length": report.length, "ok": report.ok, "rows": rows, "notes": untested}


def longer_name(path: Path, taken: Collection[str]) -> str:
    """The end of a path, with as many of its folders as make it a new name."""
    parts = path.resolve().parts
    names = ("/".join(parts[-count:]) for count in range(2, len(parts) + 1))
    return next(name for name in names if name not in taken)


def packaged_models() -> Iterator[StoredModel]:
    for name, model in PACKAGED.items():
        path = model.path
        yield StoredModel(name, model.description, path, None if path else model.install_command)


def folder_models() -> Iterator[StoredModel]:
    for folder in DEFAULT_FOLDERS:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (what := kind_of_model(path)) is not None:
                yield StoredModel(path.as_posix(), what, path)


def weights_of(entry: StoredModel) -> Path:
    """The folder or file with the weights: of a run its newest checkpoint."""
    from regard.training.run import newest_checkpoint

    return newest_checkpoint(entry.installed).resolve()


def read_size(weights: Path) -> ModelSize:
    from regard.planning.parameters import count_parameters
    from regard.training.base_model import base_of, read_spec

    base = None if weights.is_file() else base_of(weights)
    spec = read_spec(weights)
    size = sum(map(weight_bytes, (weights, base) if base else (weights,)))
    return ModelSize(count_parameters(spec).total, size, getattr(spec, "context", None))


def weight_bytes(path: Path) -> int:
    # without those of the optimizer
    patterns = ("model*.safetensors", "adapter_model*.safetensors", "trained*.safetensors")
    files = [path] if path.is_file() else [file for pattern in patterns for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in files)


def free_name(entry: StoredModel, weights: Path, taken: Collection[str]) -> str:
    """The last part of the model's name; for a later checkpoint of a run that is served, with its step."""
    name = entry.model.rpartition("/")[2]
    if name in taken and weights.name.startswith("step-"):
        name = f"{name}-{weights.name}"
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def has_model(recipe: Path) -> bool:
    """Whether a recipe describes a model, and does not start from one."""
    import tomllib

    return "model" in tomllib.loads(recipe.read_text(encoding="utf-8"))


def free_memory(device: str) -> int | None:
    """Bytes that are free on a device; None if the system does not tell."""
    import torch

    if str(device).startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    lines: Mapping[str, str] = {}
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo", encoding="utf-8") as stream:
            lines = dict(line.split(":", 1) for line in stream if ":" in line)
    return 1024 * int(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None
