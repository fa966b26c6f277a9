"""Rows distributed over processes, with DDP and FSDP2: the same steps as in one process."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from regard.adapt.adapters import DEFAULT, add_lora
from regard.adapt.lora import LoRA
from regard.adapt.peft import adapter_tensors
from regard.data.batch import Batch
from regard.spec import SpecError
from regard.training.faults import NonFinite
from regard.training.optimizer import AdamW
from regard.training.parallel.data_parallel import block_groups, check_scalars
from regard.training.parallel.distribute import check_scope, distribute
from regard.training.parallel.mesh import Parallel, Processes
from regard.training.parallel.sharded_files import whole_tensor
from regard.training.step import evaluate, take_step
from tests.training.parallel.processes import (
    MIXTURE,
    SPEC,
    batches,
    build,
    largest_difference,
    objective,
    run_in_processes,
    train,
    train_parallel,
)  # fmt: skip


def check_weights(model: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, p), (expected_name, q) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert name == expected_name
        assert (whole_tensor(p).detach() - q).abs().max() <= tolerance, name


def check_curves(processes: Processes) -> None:
    """Steps in float64 and float32, with accumulation, of a model with tied blocks and a tied head."""
    for dtype, tolerance, steps in ((torch.float64, 1e-10, 4), (torch.float32, 1e-5, 20)):
        expected, model = build(SPEC, dtype), build(SPEC, dtype)
        curve = train(expected, batches(steps, dtype=dtype))
        found, _ = train_parallel(model, processes, steps, accumulate=2, dtype=dtype)
        assert largest_difference(found, curve) <= tolerance
        check_weights(model, expected, 1e-9 if dtype == torch.float64 else 1e-3)


def check_experts(processes: Processes) -> None:
    expected, model = build(MIXTURE), build(MIXTURE)
    curve = train(expected, batches(3))
    assert largest_difference(train_parallel(model, processes, 3)[0], curve) <= 1e-10


def check_adapters(processes: Processes) -> None:
    """Only the adapters are trained; the frozen weights stay as they are."""
    for lora in (
        LoRA(rank=2, targets="all-linear"),
        LoRA(rank=2, targets="all-linear", rslora=True, dora=True, init="pissa"),
    ):
        expected, model = build(), build()
        for adapted in (expected, model):
            add_lora(adapted, lora, seed=1)
        curve = train(expected, batches(3))
        assert largest_difference(train_parallel(model, processes, 3)[0], curve) <= 1e-10
        check_weights(model, expected, 1e-10)
        saved = {name: whole_tensor(tensor) for name, tensor in adapter_tensors(model, DEFAULT).items()}
        for name, tensor in adapter_tensors(expected, DEFAULT).items():
            assert (saved[name] - tensor).abs().max() <= 1e-10


def check_evaluation(processes: Processes) -> None:
    model = build()
    expected = evaluate(model, objective, batches(2))
    forward_model, reduction = distribute(model, processes)
    found = evaluate(forward_model, objective, batches(2, processes), reduction=reduction)
    assert found == pytest.approx(expected, abs=1e-12)
    sharded = processes.sizes.shard > 1
    assert all(isinstance(p, DTensor) == sharded for p in model.parameters())
    for _ in range(2):
        forward_model(batches(1, processes)[0].tokens, outputs=True)
        assert not model.head.weight._backward_hooks


def check_fault(processes: Processes) -> None:
    """A loss of one process that is not finite stops all of them, and changes no weight."""
    model = build()
    forward_model, reduction = distribute(model, processes)
    optimizer = AdamW().build(model, 1e-2)
    before = {name: whole_tensor(p).detach().clone() for name, p in model.named_parameters()}

    def faulty(model: nn.Module, batch: Batch):
        loss, count, metrics = objective(model, batch)
        return loss * (math.nan if processes.row_rank == 1 else 1), count, metrics

    first, last = 8 // processes.row_ranks, 16 // processes.row_ranks - 1
    with pytest.raises(NonFinite, match=f"rows {first} to {last} is nan"):
        take_step(forward_model, faulty, batches(1, processes)[0], optimizer, 1.0, reduction=reduction)
    assert all(torch.equal(before[name], whole_tensor(p)) for name, p in model.named_parameters())


def check_all(processes: Processes) -> None:
    check_curves(processes)
    check_experts(processes)
    check_adapters(processes)
    check_evaluation(processes)
    check_fault(processes)


@pytest.mark.ledger("tr.ntp")
@pytest.mark.parametrize("parallel", [Parallel(replicate=2, shard=1), Parallel()], ids=["ddp", "fsdp"])
def test_two_processes_take_the_steps_of_one(parallel: Parallel, tmp_path: Path) -> None:
    run_in_processes(check_all, parallel, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [Parallel(replicate=2), Parallel(shard=4)], ids=["replicate and shard", "shard"])
def test_four_processes_take_the_steps_of_one(parallel: Parallel, tmp_path: Path) -> None:
    run_in_processes(check_all, parallel, 4, tmp_path)


def test_blocks_that_share_parameters_are_one_group() -> None:
    model = build()
    blocks = model.stack.blocks
    assert [list(map(id, group)) for group in block_groups(model)] == [[id(blocks[0]), id(blocks[1])], [id(blocks[2])]]


def test_single_numbers_are_refused_by_name() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(SpecError, match="scale is a single number, which cannot be sharded; use parallel.replicate=-1"):
        check_scalars(model)


def test_a_loss_over_all_rows_is_refused() -> None:
    check_scope("batch", Processes())
    with pytest.raises(SpecError, match="shard=2: this loss compares all rows of a batch"):
        check_scope("batch", Processes(Parallel(shard=2)))
