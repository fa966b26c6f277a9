"""What a phase of a pipeline cost, and how well its model answers: records of single runs, and means over seeds.

After every phase the model answers held-out questions of the simulated world greedily (evals/answers.py). A reward
model has its accuracy on held-out pairs instead.
"""

import fcntl
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.checkpoint.atomic_folder import write_file
from regard.data.world.answers import AnswerGrade
from regard.engine.engine import Engine
from regard.evals.answers import grade_assistant
from regard.feedback.comparison import WinRate, count_wins, decide_by_scores
from regard.load_model import load
from regard.models.decoder import DecoderModule
from regard.objectives.base import Objective
from regard.objectives.distillation import Distillation
from regard.objectives.reinforcement import Reinforcement
from regard.planning import plan
from regard.training.history import parse_line
from regard.training.recipe import Recipe
from regard.training.run import Run

ROWS = 50  # questions that are answered together
REFERENCE = "sft"  # the phase that later ones are compared with
DESCRIPTION = ("phase", "from", "objective", "data", "steps")
METRICS = ("tokens", "flops", "seconds", "correct", "formatted", "both", "score", "win_rate", "accuracy")
Grades = dict[str, list[AnswerGrade]]  # by phase


def measure_phase(
    path: Path, grades: Grades, questions: int, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """The compute of a phase, and the grades of its model's answers; of a reward model, its accuracy on held-out pairs.

    grades: those of earlier phases, to which the new ones are added.
    """
    record, llm = describe_phase(path) | asdict(phase_cost(path)), load(path, "cpu")
    if not isinstance(llm.model, DecoderModule):
        evaluations = [values for values in read_records(path) if "held_out_accuracy" in values]
        return record | {"accuracy": evaluations[-1]["held_out_accuracy"]}
    found = grade_assistant(Engine(llm.model, rows=ROWS), llm.tokenizer, questions, on_progress=on_progress)
    reference = grades.get(REFERENCE)
    grades[path.name] = found
    return record | {
        "correct": sum(grade.correct for grade in found) / questions,
        "formatted": sum(grade.formatted for grade in found) / questions,
        "both": sum(all(grade) for grade in found) / questions,
        "score": sum(grade.score for grade in found) / questions,
        **({} if reference is None else {"win_rate": win_rate(found, reference).rate}),
    }


def win_rate(grades: Sequence[AnswerGrade], others: Sequence[AnswerGrade]) -> WinRate:
    """Of two answers to one question, the one with the larger score wins."""
    return count_wins(decide_by_scores([grade.score for grade in grades], [grade.score for grade in others]))


@dataclass(frozen=True)
class PhaseCost:
    tokens: int  # that the run was trained on
    flops: float  # of training and of the forward passes for sampling, references, teachers and reward models
    seconds: float


def describe_phase(path: Path) -> dict[str, Any]:
    """The name of a phase, the earlier phase or model that it started from, its objective, data and steps."""
    config, recipe = (run := Run.open(path)).config, Recipe.from_dict(run.config)
    start, folder = config.get("from"), path.absolute().parent
    if start is not None and folder in Path(start).parents:
        start = Path(start).relative_to(folder).parts[0]
    source = recipe.data.sources[0].to_dict()
    return {
        "phase": path.name,
        "from": start,
        "objective": config["objective"]["kind"],
        "data": str(source.get("task") or source.get("path") or source["kind"]),
        "steps": recipe.train.steps,
    }


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
    if isinstance(objective, Distillation):
        return 1 + objective.on_policy
    return float(objective is not None and objective.needs_reference)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are complete."""
    lines = (path / "metrics.jsonl").read_bytes().splitlines()
    return [record for line in lines if (record := parse_line(line)) is not None]


def write_results(file: Path, about: Mapping[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write the records of a seed's phases to a file, in which those of other seeds stay. Returns its content.

    Records of a seed with other phases or another number of questions are left out: means would mix them. The lock is
    for processes that train other seeds.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        kept = read_runs(file, about["questions"], [run["phase"] for run in runs])
        seeds = {seed: records for seed, records in kept.items() if (file.parent / f"seed-{seed}").is_dir()}
        seeds[runs[0]["seed"]] = list(runs)
        everything = [run for seed in sorted(seeds) for run in seeds[seed]]
        content = {**about, "seeds": sorted(seeds), "phases": summarize(everything), "runs": everything}
        write_file(file, (json.dumps(content, indent=2) + "\n").encode())
    return content


def read_runs(file: Path, questions: int, phases: Sequence[str]) -> dict[int, list[dict[str, Any]]]:
    """By seed, the records of a file with these questions and phases; none if it is damaged or missing."""
    seeds: dict[int, list[dict[str, Any]]] = {}
    try:
        content = json.loads(file.read_bytes())
        for run in content["runs"] if content["questions"] == questions else ():
            seeds.setdefault(int(run["seed"]), []).append(run)
        summarize(content["runs"])  # raises an error if a record is incomplete
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return {}
    return {seed: runs for seed, runs in seeds.items() if [run["phase"] for run in runs] == list(phases)}


def summarize(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A record per phase: of each metric the mean over the seeds with its smallest and largest value, and the phase's
    share of all FLOPs."""
    total, phases = sum(result["flops"] for result in results), []
    for name in dict.fromkeys(result["phase"] for result in results):
        rows = [result for result in results if result["phase"] == name]
        phase = {key: rows[0][key] for key in DESCRIPTION}
        for metric in METRICS:
            if values := [row[metric] for row in rows if metric in row]:
                phase[metric] = {"mean": fmean(values), "low": min(values), "high": max(values)}
        phases.append(phase | {"share": sum(row["flops"] for row in rows) / total})
    return phases
