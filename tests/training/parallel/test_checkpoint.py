"""Checkpoints of distributed models: complete or absent, and independent of the number of processes."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.checkpoint.atomic_folder import CheckpointError, check_folder, hidden_sibling, write_folder
from regard.checkpoint.model_folder import load, unique_parameters
from regard.training.optimizer import AdamW, load_optimizer_state, optimizer_state
from regard.training.parallel.checkpoint import write_together
from regard.training.parallel.distribute import distribute, split_groups
from regard.training.parallel.mesh import Parallel, Processes
from regard.training.parallel.sharded_files import ShardedFiles, assign_writers, collect_share, whole_tensor
from regard.training.resume_state import load_weights, read_moments
from tests.training.parallel.processes import batches, build, largest_difference, run_in_processes, train

BEFORE, AFTER = 3, 3  # steps


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes) -> None:
    with write_together(folder, write_folder(folder), processes) as temporary:
        collect_share(unique_parameters(model), "model", processes).write(temporary)
        collect_share(optimizer_state(optimizer), "optimizer", processes).write(temporary)
        if processes.is_main:
            (temporary / "config.json").write_text(json.dumps({"model_type": "regard", "spec": model.spec.to_dict()}))


def check_resume(processes: Processes, saved: str | None, folder: str) -> None:
    """Train, save, and compare with one process; or resume what another number of processes saved."""
    expected, model = build(), build()
    reference = AdamW().build(expected, 1e-2)
    data = batches(BEFORE + AFTER)
    train(expected, data[:BEFORE], optimizer=reference)
    weights = {name: p.detach().clone() for name, p in expected.named_parameters()}
    moments = {name: t.clone() for name, t in optimizer_state(reference).items()}
    forward_model, reduction = distribute(model, processes)
    optimizer = AdamW().build(model, 1e-2)
    split_groups(optimizer)
    local = batches(BEFORE + AFTER, processes)
    if saved is None:
        train(forward_model, local[:BEFORE], 1, reduction, optimizer)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_weights(Path(saved), model)
        load_optimizer_state(optimizer, read_moments(Path(saved), optimizer))
    for name, parameter in model.named_parameters():
        assert (whole_tensor(parameter).detach() - weights[name]).abs().max() <= 1e-10, name
    for name, tensor in optimizer_state(optimizer).items():
        assert (whole_tensor(tensor) - moments[name]).abs().max() <= 1e-10, name
    save(Path(folder), model, optimizer, processes)
    curve = train(expected, data[BEFORE:], optimizer=reference)
    assert largest_difference(train(forward_model, local[BEFORE:], 1, reduction, optimizer), curve) <= 1e-10


def check_failures(processes: Processes, folder: str) -> None:
    """A process that fails while it writes: all raise an error, and the old checkpoint stays."""
    path = Path(folder) / "state"
    with write_together(path, write_folder(path), processes) as temporary:
        (temporary / f"{processes.rank}").write_text("old")
    error = OSError if processes.rank == 1 else CheckpointError
    with (
        pytest.raises(error, match="No space left" if processes.rank == 1 else "another process failed"),
        write_together(path, write_folder(path), processes) as temporary,
    ):
        (temporary / f"{processes.rank}").write_text("new")
        if processes.rank == 1:
            raise OSError(28, "No space left on device")
    processes.wait_for_all()  # the main process deletes the temporary folder after the others have their error
    check_folder(path)
    assert [(path / str(rank)).read_text() for rank in range(2)] == ["old", "old"]
    assert not hidden_sibling(path, "partial").exists()


@pytest.mark.slow
def test_a_checkpoint_is_resumed_by_another_number_of_processes(tmp_path: Path) -> None:
    for name in ("four", "two", "rendezvous-4", "rendezvous-2"):
        (tmp_path / name).mkdir()
    run_in_processes(
        check_resume, Parallel(shard=2, tensor=2), 4, tmp_path / "rendezvous-4", None, str(tmp_path / "four" / "s")
    )
    four = tmp_path / "four" / "s"
    check_folder(four)
    assert len(list(four.glob("model-0000?-of-00004.safetensors"))) == 4
    run_in_processes(check_resume, Parallel(), 2, tmp_path / "rendezvous-2", str(four), str(tmp_path / "two" / "s"))
    check_resume(Processes(), str(tmp_path / "two" / "s"), str(tmp_path / "one"))
    assert (tmp_path / "one" / "model.safetensors").is_file()
    models = [load(folder) for folder in (four, tmp_path / "one")]
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


def test_nothing_is_committed_if_a_process_fails(tmp_path: Path) -> None:
    run_in_processes(check_failures, Parallel(), 2, tmp_path, str(tmp_path))


def test_all_processes_write_about_equally_many_bytes() -> None:
    sizes = {"a": 8, "b": 4, "c": 4, "d": 1, "e": 0}
    writers = assign_writers(sizes, 2)
    totals = [sum(size for name, size in sizes.items() if writers[name] == rank) for rank in range(2)]
    assert sorted(totals) == [8, 9]
    assert list(writers) == list(sizes)
    assert set(assign_writers(sizes, 8).values()) == set(range(5))


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither model.safetensors nor model.safetensors.index.json"):
        ShardedFiles(tmp_path, "model")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(CheckpointError, match="must be a file in the folder"):
        ShardedFiles(tmp_path, "model")
