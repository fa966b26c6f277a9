"""The processes of a training run as a mesh with named dimensions.

    replicate   each process holds all weights and its own rows of the batch (DDP)
    shard       weights, gradients and moments are sharded; each process has its own rows (FSDP, ZeRO-3)
    expert      experts are distributed; each process has its own rows
    context     each process holds a part of every sequence (ring attention)
    tensor      each process holds a part of every matrix, and the same rows

The product of the sizes is the number of processes that `torchrun` started. One of `replicate` and `shard` may be -1:
all remaining processes. Without torchrun there is one process and no mesh.
"""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from regard.spec import Spec, require

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("replicate", "shard", "expert", "context", "tensor")  # the last one has adjacent ranks
WITH_OWN_ROWS = ("replicate", "shard", "expert")
REMAINING = -1
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Parallel(Spec):
    """The number of processes along each dimension."""

    replicate: int = 1
    shard: int = REMAINING
    tensor: int = 1
    context: int = 1
    expert: int = 1

    def check(self) -> None:
        for name in DIMENSIONS:
            size = getattr(self, name)
            may_remain = name in ("replicate", "shard")
            allowed = "at least 1, or -1 for all remaining processes" if may_remain else "at least 1"
            require(size >= 1 or may_remain and size == REMAINING, f"parallel: {name}={size}, but it must be {allowed}")
        require(
            REMAINING not in (self.replicate, self.shard) or self.replicate != self.shard,
            "parallel: replicate=-1 and shard=-1, but only one can be all remaining processes; set one of them",
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DIMENSIONS}

    def resolve(self, processes: int) -> "Parallel":
        """The same sizes without -1, for this number of processes."""
        known = prod(size for size in self.sizes.values() if size != REMAINING)
        open_name = next((name for name, size in self.sizes.items() if size == REMAINING), None)
        if open_name is not None:
            require(
                processes % known == 0,
                f"parallel: {processes} processes cannot be divided by the other sizes ({describe(self)}); start a "
                f"multiple of {known} with torchrun",
            )
            return replace(self, **{open_name: processes // known})
        require(
            known == processes,
            f"parallel: {describe(self)} needs {known} processes, but there are {processes}; start "
            f"torchrun --nproc-per-node={known}, or set shard=-1 to use all",
        )
        return self


def check_processes(parallel: Parallel, rows: int) -> None:
    """Raise SpecError if the processes that torchrun started cannot be used so, or cannot share a batch of rows."""
    sizes = parallel.resolve(process_count())
    ranks = prod(getattr(sizes, name) for name in WITH_OWN_ROWS)
    require(
        rows % ranks == 0,
        f"parallel: {describe(sizes)}: {rows} rows cannot be divided by {ranks} processes; set data.rows to a multiple",
    )


def describe(parallel: Parallel) -> str:
    """The sizes other than 1, as `shard=2 · tensor=2`."""
    return " · ".join(f"{name}={size}" for name, size in parallel.sizes.items() if size != 1) or "one process"


@dataclass(frozen=True, eq=False)
class Processes:
    """This process and the mesh of all of them; `mesh` is None if there is only one."""

    sizes: Parallel = Parallel(shard=1)
    device: torch.device = torch.device("cpu")
    rank: int = 0
    mesh: "DeviceMesh | None" = None
    group: dist.ProcessGroup | None = None  # that agrees; None: the one of all processes

    @property
    def count(self) -> int:
        return prod(self.sizes.sizes.values())

    @property
    def is_main(self) -> bool:
        """Whether this process writes the log and prints."""
        return self.rank == 0

    @property
    def row_ranks(self) -> int:
        """The number of parts into which the rows of a batch are split."""
        return prod(getattr(self.sizes, name) for name in WITH_OWN_ROWS)

    @property
    def random_stream(self) -> int:
        """Added to the seed: processes with the same tokens draw the same random numbers, for example for dropout."""
        return self.row_rank * self.sizes.context + self.index("context")

    @property
    def row_rank(self) -> int:
        """The part of a batch that this process trains on."""
        rank = 0
        for name in WITH_OWN_ROWS:
            rank = rank * getattr(self.sizes, name) + self.index(name)
        return rank

    def index(self, name: str) -> int:
        """The index of this process along a dimension."""
        return 0 if getattr(self.sizes, name) == 1 or self.mesh is None else self.mesh.get_local_rank(name)

    def submesh(self, *names: str) -> "DeviceMesh | None":
        """The mesh of those dimensions that have more than one process, flattened to one; None if there are none."""
        if self.mesh is None or not (kept := tuple(name for name in names if getattr(self.sizes, name) > 1)):
            return None
        return self.mesh[kept[0]] if len(kept) == 1 else self.mesh[kept]._flatten("_".join(kept))

    def in_background(self) -> "Processes":
        """The same processes with a group of their own, so that a thread can agree on a save while training goes on.

        All processes must call it.
        """
        if self.mesh is None:
            return self
        return replace(self, device=torch.device("cpu"), group=dist.new_group(backend="gloo", timeout=TIMEOUT))

    def all_agree(self, value: bool) -> bool:
        """Whether the value is true in all processes."""
        if self.mesh is None:
            return value
        flag = torch.tensor(int(value), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, self.group)
        return bool(flag)

    def any_has(self, value: bool) -> bool:
        """Whether the value is true in some process."""
        return not self.all_agree(not value)

    def from_main(self, number: int) -> int:
        """The number that the main process has."""
        if self.mesh is None:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.broadcast(shared, 0)
        return int(shared)

    def sum_rows(self, number: int) -> int:
        """The sum over the parts of a batch."""
        if self.mesh is None:
            return number
        total = torch.tensor(number, device=self.device)
        dist.all_reduce(total)
        return int(total) // (self.sizes.context * self.sizes.tensor)

    def sum_heads(self, values: Tensor) -> Tensor:
        """The sum over the processes along `tensor`, which have different heads."""
        if (mesh := self.submesh("tensor")) is not None:
            dist.all_reduce(values, group=mesh.get_group())
        return values

    def wait_for_all(self) -> None:
        self.all_agree(True)


@contextmanager
def process_group(device: torch.device | str, init_method: str | None = None) -> Generator[torch.device]:
    """Join the processes that torchrun started; without torchrun there is only this one. Yields its device.

    It waits until all processes have joined. Of several GPUs each process uses the one of its local rank.
    `init_method` is that of torch's init_process_group.
    """
    device = torch.device(device)
    if process_count() == 1:
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # Gathering a tensor that is sharded along two dimensions warns once that it takes two operations.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    backend = "nccl" if device.type == "cuda" else "gloo"
    rank, count = process_rank(), process_count()
    store, _, _ = next(dist.rendezvous(init_method or "env://", rank, count, timeout=TIMEOUT))
    # After a restart the store may still hold the addresses of the processes that were killed.
    store = dist.PrefixStore(f"attempt-{restarts()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def make_processes(parallel: Parallel, device: torch.device) -> Processes:
    """The processes of the group that `process_group` joined."""
    sizes = parallel.resolve(process_count())
    if process_count() == 1:
        return Processes(sizes, device)
    return Processes(sizes, device, process_rank(), make_mesh(sizes, device))


def make_mesh(sizes: Parallel, device: torch.device) -> "DeviceMesh":
    """A mesh with the dimensions that have more than one process."""
    from torch.distributed.device_mesh import init_device_mesh

    names = tuple(name for name, size in sizes.sizes.items() if size > 1)
    return init_device_mesh(device.type, tuple(sizes.sizes[name] for name in names), mesh_dim_names=names)


def process_count() -> int:
    """The number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def restarts() -> int:
    """How often torchrun restarted the processes after a failure (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_restart() -> bool:
    return restarts() > 0
