"""The number of rows and blocks of an engine's store, from the memory of its device.

    rows     32 on a CPU, 256 on a GPU; fewer if what a store keeps per row would need more than half of the budget
    blocks   as many as the rest of the budget holds, at most twice all rows at full capacity: the rest keeps prefixes

The budget is a share of the memory: on a GPU of what is free beside the weights, and the pool is allocated at once; on
a CPU of all of it, and memory is used only as blocks are written (stores/arrays.py).
"""

import os
from pathlib import Path

import torch

from regard.engine.stores.base import ModelMemory, OpenStore, Store
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import BLOCK, Paged

ROWS = {"cpu": 32, "cuda": 256}
SHARES = {"cpu": 0.25, "cuda": 0.8}
STATES = 4  # copies of a row's states that the paged store keeps per row, for reused prefixes
UNKNOWN = 8 * 2**30  # bytes, where the system does not tell


def open_store(
    constructor: OpenStore, states: ModelMemory, rows: int | None, capacity: int, dtype: torch.dtype,
    device: torch.device, source: int, share: float | None,
) -> Store:  # fmt: skip
    """A store of these sizes. rows, share: None: chosen by the device."""
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"engine: memory={share!r} must be a share of the device's memory, above 0 and at most 1")
    most = ROWS.get(device.type, ROWS["cpu"])
    if constructor not in (Paged, Contiguous):
        if share is not None:
            raise ValueError("engine: memory sets the size of a store that is given by its name; give one or the other")
        return constructor(states, rows or most, capacity, dtype, device, source)
    budget = int((share or SHARES.get(device.type, SHARES["cpu"])) * memory_of(device))
    if constructor is Contiguous:
        one = bytes_of(Contiguous(states, 1, capacity, dtype, "meta", source))
        return Contiguous(states, rows or clamp(budget // max(one, 1), most), capacity, dtype, device, source)
    sample = Paged(states, 1, capacity, dtype, "meta", source, blocks=1)
    two_blocks = sum(array.nbytes for storage in sample.per_token for array in storage.arrays.values())
    per_block = two_blocks // 2  # one block, and block 0
    per_row = (1 + STATES) * (bytes_of(sample) - two_blocks)
    rows = rows or clamp(budget // 2 // max(per_row, 1), most)
    blocks = clamp((budget - rows * per_row) // max(per_block, 1), 2 * rows * -(-capacity // BLOCK))
    return Paged(states, rows, capacity, dtype, device, source, blocks=blocks, states=STATES * rows)


def divided_share(share: float | None, index: int, engines: int, device: torch.device) -> float:
    """The share for engine `index` of several that are opened one after another and together take `share`, in equal
    parts. On a GPU the earlier engines have already reduced the free memory, of which a share is taken."""
    total = share or SHARES.get(device.type, SHARES["cpu"])
    part = total / engines
    return part / (1 - index * part) if device.type == "cuda" else part


def bytes_of(store: Store) -> int:
    return sum(array.nbytes for storage in store.storages for array in storage.arrays.values())


def clamp(number: int, most: int) -> int:
    return max(1, min(number, most))


def memory_of(device: torch.device) -> int:
    """Bytes of memory: those that are free on a GPU, all of the machine's or container's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        total = UNKNOWN
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total
