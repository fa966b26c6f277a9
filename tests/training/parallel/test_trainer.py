"""The training loop in several processes: the curve of one, checkpoints for any number, restarts of torchrun."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from regard.checkpoint.model_folder import load
from regard.training.muon import Muon
from regard.training.parallel.mesh import Parallel, Processes
from regard.training.parallel.sharded_files import ShardedFiles
from tests.training.parallel.processes import largest_difference, run_in_processes
from tests.training.parallel.runs import SETTINGS, curve, run_trainer

ROOT = Path(__file__).parents[3]


def check_run(processes: Processes, folder: str) -> None:
    run_trainer(processes, Path(folder))


def check_continued(processes: Processes, folder: str) -> None:
    run_trainer(processes, Path(folder), replace(SETTINGS, steps=10, evaluate_every=5))


def check_same_weights(a: Path, b: Path, tolerance: float) -> None:
    for p, q in zip(load(a).parameters(), load(b).parameters(), strict=True):
        assert (p - q).abs().max() <= tolerance


def folders(path: Path, *names: str) -> list[Path]:
    for name in names:
        (path / name).mkdir()
    return [path / name for name in names]


@pytest.mark.parametrize(
    "parallel",
    [Parallel(), pytest.param(Parallel(replicate=2, shard=1), marks=pytest.mark.slow)],
    ids=["fsdp", "ddp"],
)
def test_a_run_of_two_processes_has_the_curve_of_one_and_is_continued_by_one(
    parallel: Parallel, tmp_path: Path
) -> None:
    single, shared, rendezvous = folders(tmp_path, "single", "shared", "rendezvous")
    run_trainer(Processes(), single)
    run_in_processes(check_run, parallel, 2, rendezvous, str(shared))
    assert largest_difference(curve(shared), curve(single)) <= 1e-5
    last = shared / "checkpoints" / "step-000008"
    check_same_weights(last, single / "checkpoints" / "step-000008", 1e-4)
    assert json.loads((last / "training.json").read_text())["processes"] == 2
    assert {file.name for file in last.glob("rng*")} == {"rng.safetensors", "rng-1.safetensors"}
    assert len(ShardedFiles(last, "optimizer").shapes) > 0
    check_continued(Processes(), str(shared))
    check_continued(Processes(), str(single))
    assert largest_difference(curve(shared), curve(single)) <= 1e-5


AVERAGED = replace(
    SETTINGS, steps=4, optimizer=Muon(), ema=0.9, layer_decay=0.8, freeze=("embedding*",), length_warmup=3
)


def check_averaged(processes: Processes, folder: str) -> None:
    run_trainer(processes, Path(folder), AVERAGED)


@pytest.mark.slow
def test_two_replicas_average_the_weights_of_muon_as_one_process(tmp_path: Path) -> None:
    single, shared, rendezvous = folders(tmp_path, "single", "shared", "rendezvous")
    run_trainer(Processes(), single, AVERAGED)
    run_in_processes(check_averaged, Parallel(replicate=2, shard=1), 2, rendezvous, str(shared))
    assert largest_difference(curve(shared), curve(single)) <= 1e-5
    check_same_weights(shared / "ema", single / "ema", 1e-5)


@pytest.mark.slow
def test_a_run_of_four_processes_is_continued_by_two(tmp_path: Path) -> None:
    single, shared, four, two = folders(tmp_path, "single", "shared", "four", "two")
    run_trainer(Processes(), single)
    check_continued(Processes(), str(single))
    run_in_processes(check_run, Parallel(tensor=2), 4, four, str(shared))
    run_in_processes(check_continued, Parallel(), 2, two, str(shared))
    assert largest_difference(curve(shared), curve(single)) <= 1e-5
    check_same_weights(shared / "checkpoints" / "step-000010", single / "checkpoints" / "step-000010", 1e-4)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_run_from_its_last_checkpoint(tmp_path: Path) -> None:
    """One of two processes is killed in step 6; the run ends bit-identical to an undisturbed one."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    script = str(Path(__file__).with_name("runs.py"))
    for name, step in (("killed", 5), ("undisturbed", 99)):
        (tmp_path / name).mkdir()
        command = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", script, str(tmp_path / name), str(step)]
        result = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *command], env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr[-3000:]
    assert curve(tmp_path / "killed") == curve(tmp_path / "undisturbed")
    check_same_weights(*(tmp_path / name / "checkpoints" / "step-000008" for name in ("killed", "undisturbed")), 0.0)
