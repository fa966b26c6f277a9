"""Preference tuning moves a model's answers towards what raters prefer.

The phases of `regard pipeline assistant`: a small model is pretrained on documents of the simulated world, fine-tuned
on conversations (SFT), and from there tuned in several ways for the raters' preference, correct answers in a certain
form: directly on pairs of answers (DPO), and by reinforcement on answers that it samples, rewarded by the rule (GRPO)
or by a reward model that has learned it from pairs (PPO). The rater is the rule. It compares the answers to held-out
questions with those of SFT; ties count half. The FLOPs of every phase are counted, those of sampling, references and
reward models included.

The full size uses the runs in runs/assistant, and trains those that are missing.
"""

# ledger: rlhf.aligned tr.share

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.pipeline import Phase, merge, read_pipeline, run_pipeline
from regard.pipeline_results import REFERENCE, Grades, measure_phase, win_rate

TUNED = {"dpo": "DPO", "grpo": "GRPO", "ppo": "PPO"}
FOLDER = Path("runs/assistant")
LEAST_GAIN = 0.05  # of the share of answers that are correct and in the preferred form
TINY: dict[str, Any] = {  # for the quick size
    "model": {"width": 24, "layers": [{"blocks": [{"sublayers": [{"body": {"kind": "attention", "heads": 2}}]}]}]},
    "tokenizer": {"by": "byte"},
}


def run(bench: Bench) -> Findings:
    records, grades = measure_phases(bench)
    wins = {name: win_rate(grades[name], grades[REFERENCE]) for name in TUNED}
    total = sum(record["flops"] for record in records.values())
    shares = {name: record["flops"] / total for name, record in records.items()}
    checks = []
    for name, label in TUNED.items():
        before, after = records[REFERENCE], records[name]
        checks += [
            Check(f"{label} wins against SFT in more than half of the comparisons, by more than the 95 % interval",
                  f"{wins[name].rate:.1%}, from {wins[name].low:.1%} to {wins[name].high:.1%}", wins[name].low > 0.5),
            Check(f"{label}: at least {LEAST_GAIN:.0%} more answers are correct and in the preferred form",
                  f"{before['both']:.1%} to {after['both']:.1%}", after["both"] >= before["both"] + LEAST_GAIN),
        ]  # fmt: skip
    checks.append(
        Check("pretraining takes more compute than all other phases together",
              ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), shares["pretrain"] > 0.5)
    )  # fmt: skip
    answering = {name: record for name, record in records.items() if "correct" in record}
    table = [
        {
            "phase": name,
            "correct": record["correct"],
            "in form": record["formatted"],
            "both": record["both"],
            "wins against SFT": wins[name].rate if name in wins else "",
            "tokens": record["tokens"],
            "FLOPs": record["flops"],
            "share of FLOPs": shares[name],
        }
        for name, record in answering.items()
    ]
    columns = {"correct": "correct", "formatted": "in form", "both": "both"}
    bars = {label: [(i, record[key]) for i, record in enumerate(answering.values())] for key, label in columns.items()}
    plots = [
        Plot("", "share of answers", bars, groups=tuple(answering)),
        Plot("", "share of FLOPs", {"FLOPs": list(enumerate(shares.values()))}, groups=tuple(shares)),
    ]
    questions = len(grades[REFERENCE])
    return Findings(table, checks, plots, f"{questions} held-out questions, answered greedily. Level 1 of the world.")


def measure_phases(bench: Bench) -> tuple[dict[str, dict[str, Any]], Grades]:
    """The records of all phases, and the grades of their answers; trains the phases that are not finished."""
    phases = [resize(phase, bench) for phase in read_pipeline("assistant")]
    records: dict[str, dict[str, Any]] = {}
    grades: Grades = {}
    progress = bench.each("phases", phases)

    def measure(path: Path) -> None:
        next(progress)
        records[path.name] = measure_phase(path, grades, bench.setting(400, 2))

    with open_folder(bench) as folder:
        if run_pipeline(phases, folder, bench.seed, "cpu", Console(quiet=True), measure) is not None:
            raise KeyboardInterrupt
    next(progress, None)
    return records, grades


def resize(phase: Phase, bench: Bench) -> Phase:
    tables = merge(phase.tables, {"train": {"steps": bench.training(phase.tables["train"]["steps"], 1)}})
    if bench.size == "quick":
        tables = merge(
            tables, {"data": {"rows": 8, "length": 400, "held_out": 1}, "train": {"schedule": {"warmup": 1}}}
        )
        tables = merge(tables, TINY) if "from" not in tables else tables
    return replace(phase, tables=tables)


@contextmanager
def open_folder(bench: Bench) -> Generator[Path]:
    """The directory of the phases: that of the pipeline for the full size, else a temporary one."""
    if bench.size == "full":
        yield FOLDER
        return
    with TemporaryDirectory() as folder:
        yield Path(folder)
