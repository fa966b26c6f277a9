"""Devices as their makers describe them: what fits, and how fast it can be read.

Per streaming multiprocessor: `fast` bytes of L1 and shared memory in one, of which a block of threads can use `usable`.
Sources: NVIDIA's architecture whitepapers (A100 2020, H100 2022, Ada 2023, Blackwell RTX 2025), data sheets, and the
CUDA C++ Programming Guide's table of compute capabilities. FLOP/s are of dense bfloat16 matrix products.
"""

from dataclasses import dataclass

from regard.plan.cost import Plan
from regard.plan.flash import standard_traffic, tiled_traffic
from regard.plan.formats import room
from regard.spec import nearest

KIB, GB = 2**10, 10**9


@dataclass(frozen=True)
class Device:
    memory: int  # bytes
    bandwidth: int  # bytes a second
    flops: int  # a second
    fast: int
    usable: int

    def seconds(self, flops: float, bytes_read: float) -> float:
        """The least time for this work: what computing or reading takes, whichever is longer."""
        return max(flops / self.flops, bytes_read / self.bandwidth)


DEVICES = {
    "a100": Device(80 * GB, 2039 * GB, 312_000 * GB, 192 * KIB, 163 * KIB),
    "h100": Device(80 * GB, 3350 * GB, 989_000 * GB, 256 * KIB, 227 * KIB),
    "h200": Device(141 * GB, 4800 * GB, 989_000 * GB, 256 * KIB, 227 * KIB),
    "rtx4090": Device(24 * GB, 1008 * GB, 165_000 * GB, 128 * KIB, 99 * KIB),
    "rtx5090": Device(32 * GB, 1792 * GB, 209_000 * GB, 128 * KIB, 99 * KIB),
    "rtx6000ada": Device(48 * GB, 960 * GB, 364_000 * GB, 128 * KIB, 99 * KIB),
}


def device(name: str) -> Device:
    if name not in DEVICES:
        raise ValueError(f"there is no device {name!r}; {nearest(name, DEVICES)}")
    return DEVICES[name]


def device_plan(name: str, plan: Plan) -> dict[str, dict[str, float | None]]:
    """Groups for a plan: what fits on the device, and how fast it could go at most."""
    found = device(name)
    step = found.seconds(plan.batch * plan.decode_flops, plan.weights_read + plan.memory_read)
    prompt = found.seconds(plan.batch * plan.flops(plan.context, plan.context), plan.weights_read)
    held, tiles = plan.weight_bytes() + plan.state_bytes, found.usable // 2  # numbers of 16 bits
    traffic: dict[str, dict[str, float | None]] = {
        f"traffic_bytes_{head_dim}_wide": {
            "scores_written_down": 2 * standard_traffic(plan.context, head_dim),
            "tiled": 2 * tiled_traffic(plan.context, head_dim, tiles),
        }
        for _, _, head_dim in plan.attentions
    }
    return traffic | {
        f"{name}_bytes": {"memory": found.memory, "left_beside_weights": found.memory - held},
        f"on_{name}": {
            "tokens_of_cache_that_fit": room(found.memory, held, plan.kv_bytes_per_token),
            "seconds_to_the_first_token": prompt,
            "decode_tokens_per_second": plan.batch / step,
        },
    }
