"""This machine as a device: its memory and measured speed, and the check that training fits into its memory.

`check_memory` runs before a model is built: an absurd size (width = 10⁷) is refused with an error, where building it
would be killed by the operating system. It refuses only what cannot fit: the bytes that are needed at least are
compared with all memory of the machine.
"""

import os
import time
from pathlib import Path
from typing import Protocol

import torch

from regard.models.base import Model
from regard.planning.activations import activation_memory, parameter_count, rough_activation_bytes
from regard.planning.groups import format_number
from regard.planning.speed import Device
from regard.planning.training_plan import STATE_BYTES

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class HasTrainingSettings(Protocol):
    """The settings of the training loop, as far as memory depends on them."""

    @property
    def accumulate(self) -> int: ...

    @property
    def optimizer(self) -> object: ...


def machine_memory(device: str = "cpu") -> int:
    """Bytes of memory of a GPU, or of the machine within the limit of its container."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in map(Path, CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def check_memory(
    spec: Model,
    training: HasTrainingSettings,
    device: str = "cpu",
    rows: int | None = None,
    length: int | None = None,
    trained: int | None = None,
    processes: int = 1,
) -> None:
    """Raise ValueError if training this model needs more memory than the device has.

    rows, length: the size of a batch; without them activations are not counted. trained: the number of trained
    parameters, if the others are frozen. processes: those that train together; at best they divide everything.
    """
    memory = processes * machine_memory(device)
    needed = needed_bytes(spec, training, trained)
    if rows is not None and length is not None:
        rows = max(1, rows // training.accumulate)
        try:
            rough = rough_activation_bytes(spec, rows, length)
            # The exact count takes seconds, so it is left out where a rough one shows that there is enough memory.
            if sum(needed.values()) <= memory < sum(needed.values()) + 2 * rough:
                needed["activations"] = activation_memory(spec, rows, length)
        except (RuntimeError, OverflowError):  # a shape that torch cannot represent
            needed["activations"] = memory
    total = sum(needed.values())
    if total <= memory:
        return
    largest = max(needed, key=lambda name: needed[name])
    place = f"the GPU {device}" if device.startswith("cuda") else "this machine"
    place = place if processes == 1 else f"{place}, {processes} times,"
    raise ValueError(
        f"training this model needs at least {format_number(total, 'B')}, but {place} has "
        f"{format_number(memory, 'B')}; the largest part is {largest}: {format_number(needed[largest], 'B')}. "
        "Lower the model's width, layers or vocab, or rows or length of the data; `regard plan train` shows what fits"
    )


def needed_bytes(spec: Model, training: HasTrainingSettings, trained: int | None = None) -> dict[str, int]:
    """Bytes of weights, gradients and the optimizer's state, all in float32."""
    try:
        parameters = parameter_count(spec)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(
            f"this model is too large: {str(error).splitlines()[0]}; lower its width, layers or vocab"
        ) from None
    trained = parameters if trained is None else trained
    kind = str(getattr(training.optimizer, "kind", "adamw"))
    return {
        "weights": 4 * parameters,
        "gradients": 4 * trained,
        "optimizer state": int(STATE_BYTES.get(kind, 0.0) * trained),
    }


def measure_cpu(size: int = 1024, seconds: float = 0.2) -> Device:
    """This machine's CPU: FLOP/s of float32 matrix products, and bytes per second of copies; the best of a few."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    source = torch.zeros(1 << 24)
    target = torch.empty_like(source)
    flops = 2 * size**3 / best_time(lambda: torch.mm(a, b), seconds)
    bandwidth = 2 * source.nbytes / best_time(lambda: target.copy_(source), seconds)
    memory = machine_memory()
    return Device(memory, int(bandwidth), int(flops), 0, 0, int(bandwidth))


def best_time(function, seconds: float) -> float:
    """The shortest time of a call, of as many calls as fit into `seconds`."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best
