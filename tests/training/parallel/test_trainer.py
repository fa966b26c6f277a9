"""The training loop in several processes: the curve of one, checkpoints for any number, restarts of torchrun."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.model_folder import load
from regard.spec import SpecError
from regard.training.adafactor import Adafactor
from regard.training.muon import Muon
from regard.training.parallel.distribute import check_settings
from regard.training.parallel.mesh import Parallel, Processes
from regard.training.parallel.sharded_files import ShardedFiles
from regard.training.parallel.snapshot import SharedSnapshot
from regard.training.run import Run
from tests.training.parallel.killing import Killer
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


CHECKPOINTED = replace(SETTINGS, steps=4, checkpoint_activations=("stack.blocks.*",))


def check_checkpointed(processes: Processes, folder: str) -> None:
    run_trainer(processes, Path(folder), CHECKPOINTED)


@pytest.mark.slow
def test_two_shards_with_activation_checkpointing_have_the_curve_of_one_process_without(tmp_path: Path) -> None:
    single, shared, rendezvous = folders(tmp_path, "single", "shared", "rendezvous")
    run_trainer(Processes(), single, replace(CHECKPOINTED, checkpoint_activations=()))
    run_in_processes(check_checkpointed, Parallel(), 2, rendezvous, str(shared))
    assert largest_difference(curve(shared), curve(single)) <= 1e-5


AVERAGED = replace(
    SETTINGS,
    steps=4,
    optimizer=Muon(),
    ema=0.9,
    layer_decay=0.8,
    freeze=("embedding*",),
    length_warmup=3,
    monitor_every=2,
)


def check_averaged(processes: Processes, folder: str) -> None:
    """Train, then continue from the checkpoint of step 3."""
    run_trainer(processes, Path(folder), AVERAGED, dtype=torch.float64)
    processes.wait_for_all()
    if processes.is_main:
        shutil.rmtree(Path(folder) / "checkpoints" / "step-000004")
    run_trainer(processes, Path(folder), AVERAGED, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "count"),
    [
        (Parallel(replicate=2, shard=1), 2),
        (Parallel(), 2),
        (Parallel(shard=2, tensor=2), 4),
    ],
    ids=["ddp", "fsdp", "shard and tensor"],
)
def test_processes_take_measured_steps_of_muon_and_average_the_weights_as_one(
    parallel: Parallel, count: int, tmp_path: Path
) -> None:
    single, shared, rendezvous = folders(tmp_path, "single", "shared", "rendezvous")
    check_averaged(Processes(), str(single))
    run_in_processes(check_averaged, parallel, count, rendezvous, str(shared))
    expected, found = curve(single), curve(shared)
    measured = {name.split("/")[0] for name in expected[1] if "/" in name}
    assert measured == {"grad_norm", "largest_activation", "attention_entropy"}
    assert largest_difference(found, expected) <= 1e-10
    check_same_weights(shared / "ema", single / "ema", 1e-10)


@pytest.mark.parametrize(
    ("settings", "parallel", "message"),
    [
        ({"monitor_every": 1}, Parallel(context=2, shard=1), "context=2: the entropy of attention needs all keys"),
        ({"optimizer": Adafactor()}, Parallel(shard=2), "shard=2: adafactor needs whole matrices; use adamw, muon"),
    ],
)
def test_settings_that_need_whole_sequences_or_matrices_are_refused(settings, parallel: Parallel, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_settings(replace(SETTINGS, **settings), "token", Processes(parallel))


def check_failed_save(processes: Processes, folder: str) -> None:
    """The disk of one process is full in its second save: all stop after the same step, and the first save remains."""
    write = SharedSnapshot.write

    def write_to_full_disk(snapshot: SharedSnapshot, path: Path) -> None:
        if processes.rank == 1 and snapshot.step == 6:
            raise OSError(28, "No space left on device")
        write(snapshot, path)

    SharedSnapshot.write = write_to_full_disk
    with pytest.raises(CheckpointError, match="No space left" if processes.rank == 1 else "another process failed"):
        run_trainer(processes, Path(folder))
    processes.wait_for_all()  # fails if the other process took another number of steps
    assert [checkpoint.name for checkpoint in Run(folder).checkpoints] == ["step-000003"]


def test_all_processes_stop_at_the_same_step_if_one_cannot_save(tmp_path: Path) -> None:
    shared, rendezvous = folders(tmp_path, "shared", "rendezvous")
    run_in_processes(check_failed_save, Parallel(), 2, rendezvous, str(shared))


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
def test_runs_killed_at_random_calls_resume_exactly(tmp_path: Path) -> None:
    """docs/log.md has the result of 104 kills."""
    killer = Killer(tmp_path)
    kills = [line for seed in range(3) for line in killer.kill_run(seed)]
    assert len(kills) >= 4 and any(line.endswith("True") for line in kills), "some of them inside a save"


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
