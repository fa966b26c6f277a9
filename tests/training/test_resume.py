"""A run stopped or killed at any moment, also repeatedly, has the log and last checkpoint of an undisturbed run."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from regard.training.run import Run
from tests.training.killing import exit_code, start
from tests.training.tiny import SETTINGS, outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("undisturbed")
    assert exit_code(path) == 0
    return outcome(path)


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, int]:
    """The number of moments at which each mode can kill an undisturbed run."""
    counted = {}
    for mode in ("anywhere", "inside save", "while saving", "half a file"):
        path = tmp_path_factory.mktemp("counted")
        assert exit_code(path, mode) == 0
        counted[mode] = int((path / "calls").read_text())
    return counted


def latest_step(path: Path) -> int:
    folder = Run(path).latest()
    return int(folder.name.removeprefix("step-")) if folder else 0


def kill_and_finish(path: Path, mode: str, moments: list[int]) -> int:
    """Kill the run at each of the moments, then let it finish. Returns the number of kills."""
    kills, step = 0, 0
    for moment in moments:
        code = exit_code(path, mode, moment)
        assert code in (-signal.SIGKILL, 0)
        kills += code != 0
        assert latest_step(path) >= step, "a committed checkpoint was lost"
        step = latest_step(path)
    assert exit_code(path) == 0
    return kills


@pytest.mark.parametrize("mode", ["anywhere", "inside save", "while saving"])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 30))])
def test_a_run_killed_at_random_calls_resumes_exactly(tmp_path: Path, undisturbed, calls, mode: str, seed: int) -> None:
    rng = random.Random(f"{mode} {seed}")
    # the first is not near the end: threads wait for each other in more calls or fewer, as the run before is timed
    moments = [rng.randint(1, calls[mode] * 9 // 10), rng.randint(1, calls[mode])]
    assert kill_and_finish(tmp_path, mode, moments) > 0
    assert outcome(tmp_path) == undisturbed


def test_a_run_killed_while_writing_a_file_resumes_exactly(tmp_path: Path, undisturbed, calls) -> None:
    moments = list(range(1, calls["half a file"] + 1, 5))
    assert kill_and_finish(tmp_path, "half a file", moments) > 0
    assert outcome(tmp_path) == undisturbed


def steps_logged(path: Path) -> int:
    log = path / "metrics.jsonl"
    return log.read_text().count("tokens_per_second") if log.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_a_run_killed_by_another_process_resumes_exactly(tmp_path: Path, undisturbed, seed: int) -> None:
    rng, kills = random.Random(seed), 0
    for step in sorted(rng.sample(range(SETTINGS.steps - 1), 3)):
        process = start(tmp_path)
        while process.is_alive() and steps_logged(tmp_path) < step:
            process.join(timeout=0.001)
        process.join(timeout=rng.uniform(0, 0.02))
        process.kill()
        process.join()
        kills += process.exitcode != 0
    assert kills > 0
    assert exit_code(tmp_path) == 0
    assert outcome(tmp_path) == undisturbed


@pytest.mark.ledger("tr.warmup")
def test_a_run_interrupted_repeatedly_resumes_exactly(tmp_path: Path, undisturbed) -> None:
    for step in (1, 2, 6, 9):
        assert exit_code(tmp_path, "interrupted", step) == 130
        assert latest_step(tmp_path) == step
    assert exit_code(tmp_path, "interrupted", SETTINGS.steps) == 0, "nothing is left to do after the last step"
    assert outcome(tmp_path) == undisturbed
