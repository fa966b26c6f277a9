"""`regard sweep`: settings, trials in processes, failures, interruption and resuming."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from regard.cli.sweep import python_path
from regard.spec import SpecError
from regard.training.sweep import Sweep, SweepTrial, job_environment
from regard.training.variations import ListedValues, ValueRange, grid, parse_variations, sample, split_values
from tests.cli.conftest import regard
from tests.cli.test_runs import FINISHED, evaluation, step, write_run
from tests.server.conftest import wait_until

TINY = (
    "--data.rows=2", "--data.length=16", "--data.held_out=1", "--tokenizer.by=byte", "--train.steps=2",
    "--model.layers.0.times=1", "--model.width=24",
)  # fmt: skip


def test_values_are_split_at_commas_outside_brackets_and_quotes() -> None:
    assert split_values("k", "1e-3, 3e-3,1e-3") == ["1e-3", "3e-3"]
    assert split_values("k", "[1, 2],{a = 1, b = 2},'x,y'") == ["[1, 2]", "{a = 1, b = 2}", "'x,y'"]


def test_a_grid_has_every_combination() -> None:
    settings = grid(parse_variations(["train.lr=1,2", "model.width=8,16"]))
    assert [tuple(values.values()) for values in settings] == [("1", "8"), ("1", "16"), ("2", "8"), ("2", "16")]


def test_a_range_with_a_step_is_a_list() -> None:
    variations = parse_variations(["model.width=96..192:48", "train.lr=1e-4..1e-2:log"])
    assert variations["model.width"] == ListedValues(("96", "144", "192"))
    assert {values["model.width"] for values in sample(variations, 50, seed=0)} == {"96", "144", "192"}
    assert [values["train.seed"] for values in grid(parse_variations(["train.seed=-2..2:2"]))] == ["-2", "0", "2"]


def test_samples_do_not_depend_on_their_number() -> None:
    variations = parse_variations(["train.lr=1e-4..1e-2:log", "model.width=8..16", "train.seed=1,2"])
    assert variations["train.lr"] == ValueRange(1e-4, 1e-2, log=True, whole=False)
    assert variations["train.seed"] == ListedValues(("1", "2"))
    few, many = sample(variations, 3, seed=5), sample(variations, 200, seed=5)
    assert few == many[:3] != sample(variations, 3, seed=6)
    rates, widths = ([float(values[name]) for values in many] for name in ("train.lr", "model.width"))
    assert min(rates) >= 1e-4 and max(rates) <= 1e-2 and 60 < sum(rate < 1e-3 for rate in rates) < 140
    assert set(widths) == set(range(8, 17))
    listed = sample(parse_variations(["train.lr=1,2", "train.seed=1,2"]), 9, seed=0)
    assert len(listed) == 4 == len({tuple(values.items()) for values in listed})


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ([], "nothing is varied"),
        (["train.lr"], "write it as --vary train.lr=1e-3,3e-3"),
        (["train.lr=1,,2"], "a value is empty"),
        (["train.lr=1", "train.lr=2"], "given twice"),
        (["train.lr=2..1"], "LOW below HIGH"),
        (["train.lr=a..b"], "LOW below HIGH"),
        (["train.lr=0..1:log"], "starts above 0"),
        (["train.lr=1..2:lin"], "LOW..HIGH:log"),
        (["train.lr=1e-4..1e-2:1e-3"], "LOW..HIGH:STEP with whole numbers"),
        (["model.width=96..192:0"], "STEP above 0"),
        (["model.width=192..96:48"], "LOW must be below HIGH"),
        (["model.width=96..200:48"], "do not meet 200; end at 192"),
        (["model.width=1..1000000:1"], "1,000,000 values"),
        (["train.lr=1..2"], "number of random samples with --trials"),
    ],
)
def test_wrong_variations_are_refused(vary: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        grid(parse_variations(vary))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--vary", "train.lrr=1,2"), r"trial-001 \(train.lrr=1\).*did you mean 'lr'"),
        (("--vary", "model.width=24,25"), r"trial-002 \(model.width=25\).*divisible"),
        (("--vary", "train.lr=1,2", "--datta.rows=2"), "did you mean 'data'"),
    ],
)
def test_every_recipe_is_checked_before_the_first_trial_starts(
    option: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    refused = regard("sweep", "llama", "--out", tmp_path / "sweep", *TINY[:-1], *option)
    assert isinstance(refused.exception, ValueError)
    with pytest.raises(ValueError, match=message):
        raise refused.exception
    assert not (tmp_path / "sweep").exists()


class FakeProcess:
    def __init__(self, code: int = 0, polls: int = 1):
        self.code, self.polls, self.signals = code, polls, []

    def poll(self) -> int | None:
        self.polls -= 1
        if self.signals:
            return 130
        return self.code if self.polls < 0 else None

    def send_signal(self, number: int, /) -> None:
        self.signals.append(number)


def make_sweep(path: Path, trials: int = 3) -> Sweep:
    values = [{"train.lr": str(i)} for i in range(1, trials + 1)]
    return Sweep.create(path, "llama", {"train.steps": "4"}, values, "cpu")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.training.sweep.POLL_SECONDS", 0.001)


def test_trials_run_at_most_jobs_at_a_time_and_failures_are_recorded(tmp_path: Path) -> None:
    sweep, running, most, notes = make_sweep(tmp_path / "s", 4), {}, [], []

    def start(arguments: list[str], output: Path, slot: int) -> FakeProcess:
        run = Path(arguments[arguments.index("--out") + 1])
        assert arguments[:2] == ["train", "llama"] and "--train.steps=4" in arguments
        running[slot] = run.name
        most.append(slot)
        if run.name == "trial-002":
            output.write_text("step 1\nregard: out of memory\n\n")
            return FakeProcess(1)
        number = int(run.name[-1])
        write_run(run, [*FINISHED[:-1], evaluation(4, 5.0 - number)], checkpoint=4)
        return FakeProcess(polls=number)

    assert sweep.run(start, 2, notes.append)
    assert [trial.state for trial in sweep.trials] == ["finished", "failed", "finished", "finished"]
    assert sweep.trials[1].error == "out of memory" and set(most) == {0, 1}
    assert [trial.name for trial in sweep.ranking] == ["trial-004", "trial-003", "trial-001", "trial-002"]
    assert Sweep.open(tmp_path / "s").trials == sweep.trials
    assert any("trial-002 failed: out of memory" in text for text in notes)


def test_a_killed_sweep_resumes_started_trials_and_skips_finished_ones(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "s")
    write_run(tmp_path / "s" / "trial-001", FINISHED, checkpoint=4)
    write_run(tmp_path / "s" / "trial-002", FINISHED[:3], checkpoint=2)
    (tmp_path / "s" / "trial-003").mkdir()  # killed before its config was written
    for trial in sweep.trials[:2]:
        trial.state = "running"  # as written before the kill
    sweep.write()
    started = {}

    def start(arguments: list[str], output: Path, slot: int) -> FakeProcess:
        run = Path(arguments[2] if arguments[1] == "--resume" else arguments[3])
        started[run.name] = arguments[1]
        run.mkdir(exist_ok=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in FINISHED))
        (run / "config.json").write_text((tmp_path / "s" / "trial-001" / "config.json").read_text())
        (run / "checkpoints").mkdir(exist_ok=True)
        return FakeProcess()

    again = make_sweep(tmp_path / "s", 4)  # one more trial
    assert again.run(start, 1, lambda text: None)
    assert started == {"trial-002": "--resume", "trial-003": "llama", "trial-004": "llama"}
    with pytest.raises(ValueError, match="another recipe, or of other values"):
        Sweep.create(tmp_path / "s", "llama", {"train.steps": "5"}, [], "cpu")


def test_an_interrupt_stops_the_running_trials(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "s")
    process = FakeProcess(polls=10**9)

    def start(arguments: list[str], output: Path, slot: int) -> FakeProcess:
        write_run(tmp_path / "s" / "trial-001", [step(1)], checkpoint=1)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    assert not sweep.run(start, 1, lambda text: None)
    assert process.signals == [signal.SIGINT]
    assert [trial.state for trial in sweep.trials] == ["stopped", "waiting", "waiting"]


def test_a_trial_of_another_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, notes = make_sweep(tmp_path / "s", 1), []
    write_run(tmp_path / "s" / "trial-001", FINISHED, checkpoint=4)
    answers = iter([True, True, False])
    monkeypatch.setattr("regard.training.sweep.is_locked", lambda folder: next(answers))
    monkeypatch.setattr(
        Sweep, "update", lambda self, trial, update=Sweep.update: len(notes) > 0 and update(self, trial)
    )
    assert sweep.run(lambda *_: pytest.fail("it was started again"), 1, notes.append)
    assert sweep.trials[0].state == "finished" and len(notes) == 1 and "another process" in notes[0]


def test_a_sweep_runs_once_at_a_time(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "s")
    with sweep.locked(), pytest.raises(ValueError, match="another process runs the sweep"):
        make_sweep(tmp_path / "s").run(lambda *_: FakeProcess(), 1, print)


def test_jobs_share_cores_and_gpus() -> None:
    assert job_environment(0, 1, 8, ["0", "1"]) == {}
    assert job_environment(3, 4, 8, ["0", "1"]) == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1"}
    assert job_environment(1, 16, 8, []) == {"OMP_NUM_THREADS": "1"}


def test_a_sweep_trains_its_trials_in_processes(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    command = ("sweep", "llama", "--out", out, *TINY, "--vary", "train.lr=1e-3,1e30", "--jobs", 2, "--device", "cpu")
    result = regard(*command)
    assert result.exit_code in (0, 1), result.output
    data = json.loads((out / "sweep.json").read_text())
    assert [trial["values"] for trial in data["trials"]] == [{"train.lr": "1e-3"}, {"train.lr": "1e30"}]
    first = data["trials"][0]
    assert first["state"] == "finished" and first["results"]["held_out_loss"] > 0
    assert (out / "trial-001" / "checkpoints" / "step-000002").is_dir() and (out / "sweep.png").stat().st_size > 5000
    assert (out / "output" / "trial-001.txt").stat().st_size > 0
    changed = (out / "trial-001" / "metrics.jsonl").stat().st_mtime_ns
    again = regard("sweep", "--resume", out, "--json")
    assert (out / "trial-001" / "metrics.jsonl").stat().st_mtime_ns == changed
    assert json.loads(again.stdout)["trials"][0] == first


@pytest.mark.slow
def test_ctrl_c_saves_the_running_trial_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    arguments = ["sweep", "llama", "--out", str(out), *TINY, "--train.steps=100000", "--vary", "train.lr=1e-3,3e-3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", *arguments],
        env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    log = out / "trial-001" / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.stat().st_size > 0, seconds=180)  # two programs import torch
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 130 and f"to continue: regard sweep --resume {out}" in printed
    states = [trial["state"] for trial in json.loads((out / "sweep.json").read_text())["trials"]]
    assert states == ["stopped", "waiting"] and list((out / "trial-001" / "checkpoints").iterdir())


def test_trials_run_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "--ray needs Ray: pip install ray" in str(
        regard("sweep", "llama", "--out", tmp_path / "s", *TINY, "--vary", "train.lr=1", "--ray").exception
    )
    calls = []

    class Remote:
        def remote(self, arguments: list[str], output: str, folder: str, path: str) -> list[int]:
            calls.append(arguments)
            write_run(Path(arguments[arguments.index("--out") + 1]), FINISHED, checkpoint=4)
            return [0]

    fake = SimpleNamespace(
        init=lambda **_: None,
        remote=lambda **options: lambda function: Remote(),
        wait=lambda references, timeout: (references, []),
        get=lambda reference: reference[0],
        cancel=lambda reference: None,
        exceptions=SimpleNamespace(TaskCancelledError=KeyError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    result = regard("sweep", "llama", "--out", tmp_path / "s", *TINY, "--vary", "train.lr=1,2", "--ray")
    assert result.exit_code == 0, result.output
    assert len(calls) == 2 and "1.7500" in result.output


def test_wrong_usage_is_refused(tmp_path: Path) -> None:
    assert regard("sweep").exit_code == 2
    assert regard("sweep", "llama", "--resume", tmp_path).exit_code == 2
    assert regard("sweep", "--resume", tmp_path, "--vary", "train.lr=1").exit_code == 2
    assert "holds no sweep" in str(regard("sweep", "--resume", tmp_path).exception)
    (tmp_path / "sweep.json").write_text("{}")
    assert "cannot be read" in str(regard("sweep", "--resume", tmp_path).exception)
    assert SweepTrial("trial-001", {"train.lr": "1"}).held_out_loss is None
