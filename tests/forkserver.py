"""The processes that tests start: forked from one server, which has imported what they need.

A test process has one such server for all of its tests, and the first of them starts it. So there is one list of
modules: with another list, each process of the later tests would import torch's compiler and more, for seconds.
"""

import multiprocessing
from collections.abc import Callable

import torch
import torch.multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.testing",
        "torch.utils.tensorboard",
        "tests.training.killing",
        "tests.training.parallel.killing",
        "tests.training.parallel.processes",
    ]
)


def run_in_each(function: Callable[..., None], arguments: tuple, count: int) -> None:
    """function(rank, *arguments) in `count` processes; raises the error of the first one that fails."""
    torch.multiprocessing.start_processes(function, arguments, count, start_method="forkserver")
