"""A step does not depend on how its rows are split into micro-batches and over processes, for every objective.

The reference is one process with all rows in one batch, in float64. Losses that compare all rows of a batch cannot be
split, and every split of them is refused.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.spec import SpecError
from regard.training.optimizer import SGD
from regard.training.parallel.distribute import check_scope, distribute, split_groups
from regard.training.parallel.mesh import Parallel, Processes
from regard.training.parallel.sharded_files import whole_tensor
from regard.training.step import take_step
from tests.objectives.test_contract import CASES, OBJECTIVES, batch_of
from tests.training.parallel.processes import run_in_processes

ROWS = 8
LR = 0.1
TOLERANCE = 1e-10  # of max|Δ| / max(1, max|reference|)
CONTENTS = ("tokens", "targets", "labels", "source", "images")  # independent of each other, unlike positions and masks
BY_TOKEN, BY_BATCH = (
    [name for name in CASES if getattr(OBJECTIVES[name], "scope", "token") == scope] for scope in ("token", "batch")
)
ONE_PROCESS = ("gan", "gan_generator", "gan_wasserstein")  # training_run.py refuses a GAN in several processes
PARALLEL = {"ddp": Parallel(replicate=2, shard=1), "fsdp": Parallel()}


def eight_rows(name: str) -> Batch:
    """The four rows of the objective's case, and four more of other contents; the rows count unequally."""
    batch, generator = batch_of(CASES[name]), torch.Generator().manual_seed(0)
    fields = {}
    for shift, (field, tensor) in enumerate(batch.items(), start=1):
        fields[field] = torch.cat([tensor, tensor.roll(shift, 0) if field in CONTENTS else tensor.flip(0)])
    if "weights" in fields:
        fields["weights"] *= torch.rand(fields["weights"].shape, generator=generator) < 0.7
    return Batch(**fields)


def take_split_step(name: str, processes: Processes, accumulate: int) -> dict[str, Tensor]:
    """The updated weights, and the loss, metrics and gradient norm of a step of this process's rows."""
    model = CASES[name].model().double().train()
    forward_model, reduction = distribute(model, processes)
    optimizer = SGD().build(model, LR)  # the first step of AdamW hardly depends on the size of a gradient
    split_groups(optimizer)
    share = ROWS // processes.row_ranks
    rows = eight_rows(name).rows(slice(processes.row_rank * share, (processes.row_rank + 1) * share))
    values = take_step(forward_model, OBJECTIVES[name], rows, optimizer, 1.0, accumulate, reduction=reduction)
    weights = {path: whole_tensor(p).detach() for path, p in model.named_parameters()}
    return weights | {path: torch.tensor(value, dtype=torch.float64) for path, value in values.items()}


def largest_errors(name: str, processes: Processes, accumulate: int) -> tuple[float, float]:
    """Of the loss, metrics and norm, and of the weights."""
    expected, found = take_split_step(name, Processes(), 1), take_split_step(name, processes, accumulate)
    assert expected.keys() == found.keys()
    errors: dict[bool, list[float]] = {True: [], False: []}
    for path, tensor in expected.items():
        error = (found[path] - tensor).abs().max() / tensor.abs().max().clamp_min(1)
        errors[tensor.ndim == 0].append(float(error))
    return max(errors[True]), max(errors[False])


@pytest.mark.parametrize("accumulate", [2, 4, 8])
@pytest.mark.parametrize("name", BY_TOKEN)
def test_micro_batches_take_the_step_of_the_whole_batch(name: str, accumulate: int) -> None:
    assert max(largest_errors(name, Processes(), accumulate)) <= TOLERANCE


def check_splits(processes: Processes) -> None:
    for name in [name for name in BY_TOKEN if name not in ONE_PROCESS]:
        for accumulate in (1, 4):
            assert max(largest_errors(name, processes, accumulate)) <= TOLERANCE, (name, accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_take_the_step_of_one(parallel: str, tmp_path: Path) -> None:
    run_in_processes(check_splits, PARALLEL[parallel], 2, tmp_path)


@pytest.mark.parametrize("name", BY_BATCH)
def test_losses_that_compare_all_rows_are_not_split(name: str) -> None:
    with pytest.raises(ValueError, match="accumulate=2: this loss compares all rows of a batch; set accumulate=1"):
        take_split_step(name, Processes(), 2)
    for parallel in (Parallel(shard=2), Parallel(replicate=2, shard=1)):
        with pytest.raises(SpecError, match="=2: this loss compares all rows of a batch; use one process, or tensor"):
            check_scope(OBJECTIVES[name].scope, Processes(parallel))
