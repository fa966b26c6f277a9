"""The phases of a pipeline: what each was trained on, what it computed, and what its model could do afterwards.

The numbers are those of `regard pipeline`, which writes results.json: the newest one below the folder of runs, or the
one that comes with the package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider
from regard.instruments.measurements import Spread, measured, newest_files, percent, read_json, spread_of
from regard.instruments.panels import bars, diagram, numbers, table
from regard.planning.groups import format_number

FILE = "results.json"
MAX_PHASES = 8
NEWEST, EXAMPLE = "my newest pipeline", "the example of the package"
AFTER = {  # key: label
    "correct": "correct answers",
    "formatted": "answers in the asked form",
    "both": "correct and in the form",
    "win_rate": "wins against sft, ties half",
    "accuracy": "reward model: pairs ranked right",
}
HEADINGS = {"correct": "correct", "formatted": "in form", "both": "both", "win_rate": "wins", "accuracy": "pairs"}


@dataclass(frozen=True)
class MeasuredPhase:
    name: str
    start: str | None  # the phase whose weights it starts from
    data: str
    objective: str
    steps: int | None
    tokens: Spread
    flops: Spread
    seconds: Spread
    share: float  # of the FLOPs of all phases
    after: Mapping[str, Spread]  # by the keys of AFTER


@dataclass(frozen=True)
class MeasuredPipeline:
    name: str
    source: str
    seeds: int
    questions: int | None
    settings: Mapping[str, Any]
    phases: Sequence[MeasuredPhase]


def read_results(results: Any, source: str) -> MeasuredPipeline:
    """The content of a results.json; ValueError if it is not one of a pipeline."""
    if not isinstance(results, dict) or not isinstance(results.get("phases"), list):
        raise ValueError(f"{source} has no list of phases")
    entries = results["phases"]
    if not 0 < len(entries) <= MAX_PHASES or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{source} has {len(entries)} phases; 1 to {MAX_PHASES} are shown")
    total = sum(spread_of(entry.get("flops")).mean for entry in entries)
    if not total > 0:
        raise ValueError(f"{source} has no FLOPs")
    phases = [read_phase(entry, total) for entry in entries]
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise ValueError(f"{source} has two phases of one name")
    seeds, questions, settings = (results.get(key) for key in ("seeds", "questions", "settings"))
    return MeasuredPipeline(
        str(results.get("pipeline", "")),
        source,
        len(seeds) if isinstance(seeds, list) else 1,
        questions if isinstance(questions, int) else None,
        settings if isinstance(settings, dict) else {},
        phases,
    )


def read_phase(entry: Mapping[str, Any], total: float) -> MeasuredPhase:
    steps, start = entry.get("steps"), entry.get("from")
    flops = spread_of(entry.get("flops"))
    return MeasuredPhase(
        str(entry.get("phase", "")),
        None if start is None else str(start),
        str(entry.get("data", "")),
        str(entry.get("objective", "")).replace("_", " "),
        steps if isinstance(steps, int) else None,
        spread_of(entry.get("tokens")),
        flops,
        spread_of(entry.get("seconds")),
        flops.mean / total,
        {key: spread_of(entry[key]) for key in AFTER if key in entry},
    )


def newest_results(folder: Path | None) -> MeasuredPipeline | None:
    """Of a pipeline below the folder of runs; files that are not of a pipeline are left out."""
    for file in [] if folder is None else newest_files(folder, FILE):
        try:
            name = file.parent.name.encode(errors="replace").decode()
            return read_results(read_json(file), f"{name}/{FILE}")
        except (OSError, ValueError):  # another program's file, or one that was removed
            continue
    return None


def flow(phases: Sequence[MeasuredPhase], chosen: int) -> Panel:
    """The phases from left to right, each beside the others that start from the same weights."""
    depths: dict[str, int] = {}
    for phase in phases:
        depths[phase.name] = depths[phase.start] + 1 if phase.start in depths else 0
    columns = [[name for name in depths if depths[name] == depth] for depth in range(max(depths.values()) + 1)]
    nodes = [
        {
            "id": phase.name,
            "label": phase.name,
            "x": depths[phase.name] / max(1, len(columns) - 1),
            "y": (columns[depths[phase.name]].index(phase.name) + 0.5) / len(columns[depths[phase.name]]),
        }
        for phase in phases
    ]
    edges = [(phase.start, phase.name, 1.0) for phase in phases if phase.start in depths]
    return diagram("a phase starts from the weights of an earlier one", nodes, edges, "phase", chosen)


def details(phases: Sequence[MeasuredPhase], chosen: int) -> Panel:
    phase = phases[chosen]
    items: dict[str, float | str] = {
        "data": phase.data or "not recorded",
        "objective": phase.objective or "not recorded",
        "starts from": phase.start or "random weights",
        "tokens trained on": format_number(phase.tokens.mean),
        "FLOPs": format_number(phase.flops.mean),
        "share of the compute": percent(phase.share),
        "seconds": phase.seconds.show(),
    }
    if phase.steps is not None:
        items["optimizer steps"] = phase.steps
    items |= {label: phase.after[key].percent() for key, label in AFTER.items() if key in phase.after}
    return numbers(items, f"phase {chosen + 1} of {len(phases)}: {phase.name}")


def overview(phases: Sequence[MeasuredPhase]) -> Panel:
    measures = [key for key in AFTER if any(key in phase.after for phase in phases)]
    columns = ("phase", "FLOPs", "share", *(HEADINGS[key] for key in measures))
    rows = []
    for phase in phases:
        after = [phase.after[key].percent() if key in phase.after else "" for key in measures]
        rows.append((phase.name, format_number(phase.flops.mean), percent(phase.share), *after))
    return table("all phases; in brackets the smallest and the largest value of a seed", columns, rows)


def provenance(found: MeasuredPipeline) -> Panel:
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items()) or "not recorded"
    columns = ("results", "pipeline", "seeds", "questions per phase", "measured with")
    row = (found.source, found.name, found.seeds, found.questions or "not recorded", settings)
    return table("where the numbers come from", columns, [row])


def phases(folder: Path | None, phase: int, measure: str, results: str) -> list[Panel]:
    found = newest_results(folder) if results == NEWEST else None
    if found is None:
        found = read_results(measured("assistant"), "the example of the package")
    chosen = min(phase, len(found.phases)) - 1
    shares = [(entry.name, 100 * entry.share) for entry in found.phases]
    key = next(key for key, label in AFTER.items() if label == measure)
    after = [(entry.name, 100 * entry.after[key].mean) for entry in found.phases if key in entry.after]
    panels = [
        flow(found.phases, chosen),
        bars("share of the compute (FLOPs); 97 to 3, often quoted, is an illustration", shares, "%", "phase", chosen),
        details(found.phases, chosen),
    ]
    if after:
        panels.append(bars(f"after the phase: {measure}", after, "%"))
    return [*panels, overview(found.phases), provenance(found)]


INSTRUMENTS = (
    Instrument(
        "phases", "Training in phases",
        "Later phases start from earlier weights, with other data and another objective; all numbers are of real runs.",
        r"C_i = c_i\,n_i, \qquad \text{share}_i = \frac{C_i}{\sum_j C_j}, \qquad "
        r"c_i \text{: FLOPs per token}, \quad n_i \text{: tokens}",
        (
            Slider("phase", "phase", 1, MAX_PHASES, 1),
            Selection("measure", "measured after each phase", tuple(AFTER.values()), AFTER["both"]),
            Selection("results", "results", (NEWEST, EXAMPLE), NEWEST),
        ),
        Quiz(
            "Pretraining is often said to take 97 % of the compute. Does it here?",
            "No: 97 to 3 is an illustration. A share follows from the tokens and the FLOPs per token, and this small "
            "model reads few tokens in pretraining; large ones read trillions before they are tuned.",
            {"phase": 1, "results": EXAMPLE},
        ),
        phases, ("pipeline.py", "instruments/phases.py"), reads_runs=True,
    ),
)  # fmt: skip
