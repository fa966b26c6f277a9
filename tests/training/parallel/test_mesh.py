"""The sizes of a mesh: -1 is the rest, and a product that differs from the number of processes is refused."""

from pathlib import Path

import pytest
import torch

from regard.spec import SpecError
from regard.training.parallel.mesh import Parallel, Processes, is_restart, make_processes, process_group
from tests.training.parallel.processes import run_in_processes


@pytest.mark.parametrize(
    ("parallel", "processes", "sizes"),
    [
        (Parallel(), 1, {}),
        (Parallel(), 8, {"shard": 8}),
        (Parallel(tensor=2), 8, {"shard": 4, "tensor": 2}),
        (Parallel(replicate=-1, shard=1), 4, {"replicate": 4}),
        (Parallel(replicate=2, shard=2, context=2), 8, {"replicate": 2, "shard": 2, "context": 2}),
    ],
)  # fmt: skip
def test_the_remaining_processes_are_computed(parallel: Parallel, processes: int, sizes: dict[str, int]) -> None:
    assert {name: size for name, size in parallel.resolve(processes).sizes.items() if size > 1} == sizes


@pytest.mark.parametrize(
    ("values", "processes", "message"),
    [
        ({"tensor": 0}, 1, "tensor=0, but it must be at least 1"),
        ({"shard": 0}, 1, "shard=0, but it must be at least 1, or -1"),
        ({"replicate": -1}, 4, "only one can be all remaining"),
        ({"tensor": 3}, 4, "4 processes cannot be divided .*start a multiple of 3"),
        ({"shard": 2}, 4, "shard=2 needs 2 processes, but there are 4; start torchrun --nproc-per-node=2"),
        ({"shard": 2, "tensor": 2}, 1, "shard=2 · tensor=2 needs 4 processes, but there are 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(values: dict[str, int], processes: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Parallel(**values).resolve(processes)


def test_without_torchrun_there_is_one_process(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group("cpu") as device:
        processes = make_processes(Parallel(), device)
        assert (processes.count, processes.mesh, processes.is_main) == (1, None, True)
        assert (processes.row_rank, processes.row_ranks) == (0, 1)
        assert processes.all_agree(True) and not processes.any_has(False)


def test_a_restart_is_recognized(monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not is_restart()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_restart()


def check_ranks(processes: Processes) -> None:
    """Ranks are in the order of the dimensions, the last one adjacent."""
    assert (processes.index("shard"), processes.index("tensor")) == divmod(processes.rank, 2)
    assert (processes.row_rank, processes.row_ranks) == (processes.rank // 2, 2)
    assert processes.is_main == (processes.rank == 0)
    assert not processes.all_agree(processes.rank != 3)
    assert processes.any_has(processes.rank == 3)
    assert processes.from_main(processes.rank + 7) == 7
    assert processes.sum_rows(10 + processes.row_rank) == 21
    flat = processes.submesh("shard", "tensor", "context")
    assert flat is not None and flat.size() == 4 and processes.submesh("context") is None
    total = torch.tensor(processes.rank)
    torch.distributed.all_reduce(total, group=flat.get_group())
    assert int(total) == 6


@pytest.mark.slow
def test_processes_know_their_place(tmp_path: Path) -> None:
    run_in_processes(check_ranks, Parallel(tensor=2), 4, tmp_path)
