"""`regard pipeline`: phases that start from earlier ones, resuming, measured results, wrong files."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from regard.data.world.answers import AnswerGrade
from regard.instruments import INSTRUMENTS
from regard.instruments.phases import HEADINGS
from regard.objectives.next_token import NextToken
from regard.objectives.policy_gradient import GRPO
from regard.objectives.preference import DPO
from regard.pipeline import PIPELINES, merge, read_pipeline
from regard.pipeline_results import further_forwards, summarize, win_rate, write_results
from regard.training.recipe import draft_recipe
from regard.training.run import Run
from tests.cli.conftest import regard

PHASES = """
[[phases]]
name = "pretrain"
recipe = "demo"
data = { task = "document", rows = 2, held_out = 1 }
model = { width = 24, layers = [{ blocks = [{ sublayers = [{ body = { kind = "attention", heads = 2 } }] }] }] }
tokenizer = { by = "byte" }
train = { steps = 2 }

[[phases]]
name = "sft"
recipe = "finetune"
from = "pretrain"
data = { source = "world", task = "instructions", rows = 2, length = 400, held_out = 1 }
train = { steps = 2, schedule = { warmup = 1 } }

[[phases]]
name = "reward"
recipe = "reward"
from = "sft"
data = { source = "world", task = "preference", rows = 2, length = 400, held_out = 1 }
train = { steps = 2, schedule = { warmup = 1 } }

[[phases]]
name = "dpo"
recipe = "dpo"
from = "sft"
full = true
data = { source = "world", task = "preference", rows = 2, length = 400, held_out = 1 }
train = { steps = 2, schedule = { warmup = 1 } }

[[phases]]
name = "grpo"
recipe = "grpo"
from = "sft"
full = true
objective = { reward = "reward", group = 2, max_new = 4 }
data = { source = "world", task = "question", rows = 2, length = 400, held_out = 1 }
train = { steps = 2, schedule = { warmup = 1 } }

[[phases]]
name = "ppo"
recipe = "ppo"
from = "sft"
full = true
objective = { reward = "reward", max_new = 4, epochs = 1 }
data = { source = "world", task = "question", rows = 2, length = 400, held_out = 1 }
train = { steps = 2, schedule = { warmup = 1 } }
"""
NAMES = ["pretrain", "sft", "reward", "dpo", "grpo", "ppo"]


@pytest.mark.ledger("tr.pipeline")
def test_phases_start_from_earlier_ones_and_go_on_after_an_interruption(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(PHASES, encoding="utf-8")
    arguments = ("pipeline", file, "--out", out, "--questions", 2, "--device", "cpu")
    first = regard(*arguments)
    assert first.exit_code == 0, first.output
    written = json.loads((out / "results.json").read_text())
    results, phases = written["runs"], written["phases"]
    assert [result["phase"] for result in results] == NAMES == [phase.name for phase in read_pipeline("assistant")]
    assert [result["from"] for result in results] == [None, "pretrain", "sft", "sft", "sft", "sft"]
    assert [result["data"] for result in results][:3] == ["document", "instructions", "preference"]
    assert sum(phase["share"] for phase in phases) == pytest.approx(1)
    assert all(phase["tokens"]["mean"] == result["tokens"] for phase, result in zip(phases, results, strict=True))
    assert results[3]["win_rate"] == 0.5 and 0 <= results[2]["accuracy"] <= 1
    assert all(result["flops"] > 0 and result["seconds"] > 0 for result in results)
    check_instrument(tmp_path, phases)
    folder = out / "seed-0"
    reward = Path(Run.open(folder / "grpo").config["objective"]["reward"])
    assert reward == Run.open(folder / "reward").latest()
    start = Run.open(folder / "dpo").config["from"]
    assert Path(start) == Run.open(folder / "sft").checkpoint(2).absolute()
    assert "adapter" not in Run.open(folder / "dpo").config
    before = (folder / "sft" / "metrics.jsonl").stat().st_mtime_ns
    weights = (Run.open(folder / "dpo").checkpoint(2) / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "dpo")  # as if it had been stopped before this phase
    again = regard(*arguments)
    assert again.exit_code == 0, again.output
    assert (folder / "sft" / "metrics.jsonl").stat().st_mtime_ns == before
    assert (Run.open(folder / "dpo").checkpoint(2) / "model.safetensors").read_bytes() == weights
    file.write_text(PHASES.replace('name = "dpo"', 'name = "dpo"\nobjective.beta = 0.5'), encoding="utf-8")
    changed = regard(*arguments)
    assert "dpo was trained with other settings" in str(changed.exception)


def check_instrument(runs: Path, phases: list[dict[str, Any]]) -> None:
    """The page shows every phase of the results.json in a folder below `runs`."""
    for i, phase in enumerate(phases):
        panels = INSTRUMENTS["phases"].panels({"phase": i + 1}, runs=runs)
        _, shares, details, *_, overview, provenance = panels
        assert shares["labels"] == NAMES and shares["values"][i] == pytest.approx(100 * phase["share"], rel=1e-5)
        items = {item["label"]: item["value"] for item in details["items"]}
        assert (items["data"], items["optimizer steps"]) == (phase["data"], phase["steps"])
        assert items["objective"] == phase["objective"].replace("_", " ")
        row = dict(zip(overview["columns"], overview["rows"][i], strict=True))
        measured = {key: heading for key, heading in HEADINGS.items() if key in phase}
        assert {key: row[heading] for key, heading in measured.items()} == {
            key: f"{100 * phase[key]['mean']:.1f}\N{NO-BREAK SPACE}%" for key in measured
        }
        assert provenance["rows"][0][:4] == ["out/results.json", "mine", 1, 2]


def record(seed: int, phase: str = "sft", **more: Any) -> dict[str, Any]:
    shared = {"from": None, "objective": "next_token", "data": "document", "steps": 2, "seconds": 1.0}
    return shared | {"seed": seed, "phase": phase, "tokens": 10, "flops": 100.0} | more


def test_results_of_other_seeds_stay(tmp_path: Path) -> None:
    file, about = tmp_path / "results.json", {"pipeline": "mine", "questions": 2}
    for seed in range(4):
        (tmp_path / f"seed-{seed}").mkdir()
    with ThreadPoolExecutor() as pool:  # as processes would that train one seed each
        list(pool.map(lambda seed: write_results(file, about, [record(seed, correct=0.1 * seed)]), range(3)))
    written = json.loads(file.read_text())
    assert written["seeds"] == [0, 1, 2] and [run["seed"] for run in written["runs"]] == [0, 1, 2]
    assert written["phases"][0]["correct"] == pytest.approx({"mean": 0.1, "low": 0.0, "high": 0.2})
    again = write_results(file, about, [record(1, correct=0.4)])
    assert [run["correct"] for run in again["runs"]] == [0.0, 0.4, 0.2] and not list(tmp_path.glob(".*"))
    (tmp_path / "seed-2").rmdir()
    assert write_results(file, about, [record(3)])["seeds"] == [0, 1, 3]
    assert write_results(file, about | {"questions": 3}, [record(1)])["seeds"] == [1]
    assert write_results(file, about | {"questions": 3}, [record(0), record(0, "dpo")])["seeds"] == [0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"runs": [1], "questions": 2}', "[" * 100_000, '{"questions": 2}'])
def test_a_damaged_file_of_results_is_replaced(content: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(content)
    assert write_results(file, {"questions": 2}, [record(0)])["seeds"] == [0]
    assert json.loads(file.read_text())["seeds"] == [0]


@pytest.mark.parametrize("name", [path.stem for path in PIPELINES.glob("*.toml")])
def test_the_phases_of_the_package_are_valid(name: str, tmp_path: Path, demo_run: Path) -> None:
    phases = read_pipeline(name)
    names = [phase.name for phase in phases]
    for number, phase in enumerate(phases):
        tables = phase.resolved_tables(tmp_path, names[:number], seed=1)
        if "from" in tables:
            assert Path(tables["from"]).name in names[:number]
            tables["from"] = str(demo_run)
        assert draft_recipe(tables)[0].train.seed == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no \\[\\[phases\\]\\]"),
        ("[[phases", "is not TOML"),
        ('[[phases]]\nrecipe = "demo"', "a phase needs a `name`"),
        ('[[phases]]\nname = "a/b"', "a phase needs a `name`"),
        ('[[phases]]\nname = "a"\n[[phases]]\nname = "a"', "two phases have the name a"),
        ('[[phases]]\nname = "a"\nrecipe = "dmeo"', "there is no recipe dmeo"),
        (PHASES.replace("max_new = 4", "max_nwe = 4"), "phase grpo: .*max_nwe.*max_new"),
        (f"{PHASES}adapter = {{ rank = 4 }}", "phase ppo has both full = true and an adapter"),
    ],
)
def test_wrong_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_pipeline(file)
    with pytest.raises(ValueError, match="there is no pipeline asistant; use a TOML file, or .*assistant"):
        read_pipeline("asistant")


def test_a_phase_that_trains_all_weights_has_a_tenth_of_the_rate_unless_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PHASES, encoding="utf-8")
    assert read_pipeline(file)[-1].tables["train"]["lr"] == pytest.approx(1e-5)
    file.write_text(PHASES.replace("train = { steps = 2, ", "train = { steps = 2, lr = 1e-4, "), encoding="utf-8")
    assert read_pipeline(file)[-1].tables["train"]["lr"] == 1e-4


def test_seeds_become_means_with_ranges() -> None:
    runs = [
        record(seed, phase, flops=flops, correct=correct)
        for seed, correct in ((0, 0.5), (1, 0.7))
        for phase, flops in (("pretrain", 300.0), ("sft", 100.0))
    ]
    first, second = summarize(runs)
    assert first["correct"] == {"mean": pytest.approx(0.6), "low": 0.5, "high": 0.7}
    assert (first["share"], second["share"]) == (0.75, 0.25) and "win_rate" not in first


def test_forward_passes_beside_training_are_counted(tmp_path: Path) -> None:
    assert further_forwards(NextToken()) == 0 and further_forwards(DPO()) == 1
    assert further_forwards(GRPO()) == 2  # sampling and the old log-probabilities
    assert further_forwards(GRPO(kl=0.1, reward=str(tmp_path), epochs=2)) == 2  # a reference, a reward model; shared


def test_tables_are_merged_deeply() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "e": {"f": 5}}) == {
        "a": {"b": 1, "c": 4},
        "d": 3,
        "e": {"f": 5},
    }


def test_ties_count_half_in_a_win_rate() -> None:
    good, plain, wrong = AnswerGrade(True, True), AnswerGrade(True, False), AnswerGrade(False, False)
    found = win_rate([good, plain, wrong, good], [plain, plain, plain, wrong])
    assert found.rate == 0.625 and (found.wins, found.ties, found.losses) == (2, 1, 1)
