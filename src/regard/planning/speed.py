"""Speed of decoding: the limits of a device, and the gain of speculative decoding.

    a step               max(FLOPs / FLOP/s, bytes read / bandwidth)
    tokens per pass      E = Σ_{i=0..k} αⁱ = (1 - α^{k+1}) / (1 - α)      α: probability that a draft is accepted
    speed-up             E / (1 + k·c)                                    c: cost of a draft step, in target passes

Speculation (Leviathan et al. 2023) verifies k draft tokens in one pass of the target, which generates one more token.
The speed-up assumes that a pass over k + 1 tokens costs as much as over one, as it does while decoding is memory-bound.
Devices: NVIDIA's architecture whitepapers (A100 2020, H100 2022, Ada 2023, Blackwell RTX 2025), data sheets, and the
CUDA C++ Programming Guide's table of compute capabilities. FLOP/s are of dense bfloat16 matrix products. Links are
NVLink 3 and 4, or PCI Express 4.0 and 5.0 with 16 lanes, in one direction.
"""

from dataclasses import dataclass

from regard.spec import suggest_name

KIB, GB = 2**10, 10**9


@dataclass(frozen=True)
class Device:
    memory: int  # bytes
    bandwidth: int  # bytes per second
    flops: int  # per second
    l1_cache: int  # bytes of L1 cache and shared memory per multiprocessor
    shared_memory: int  # bytes of these that one thread block can use as shared memory
    link: int  # bytes per second to another device

    def seconds(self, flops: float, bytes_read: float) -> float:
        """A lower bound on the time: that of computing or that of reading, whichever is longer."""
        return max(flops / self.flops, bytes_read / self.bandwidth)


DEVICES = {
    "a100": Device(80 * GB, 2039 * GB, 312_000 * GB, 192 * KIB, 163 * KIB, 300 * GB),
    "h100": Device(80 * GB, 3350 * GB, 989_000 * GB, 256 * KIB, 227 * KIB, 450 * GB),
    "h200": Device(141 * GB, 4800 * GB, 989_000 * GB, 256 * KIB, 227 * KIB, 450 * GB),
    "rtx4090": Device(24 * GB, 1008 * GB, 165_000 * GB, 128 * KIB, 99 * KIB, 32 * GB),
    "rtx5090": Device(32 * GB, 1792 * GB, 209_000 * GB, 128 * KIB, 99 * KIB, 64 * GB),
    "rtx6000ada": Device(48 * GB, 960 * GB, 364_000 * GB, 128 * KIB, 99 * KIB, 32 * GB),
}


def device_of(name: str) -> Device:
    if name not in DEVICES:
        raise ValueError(f"there is no device {name!r}; {suggest_name(name, DEVICES)}")
    return DEVICES[name]


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens per pass of the target."""
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is a probability; give a number from 0 to 1")
    if drafts < 0:
        raise ValueError(f"drafts={drafts} must not be negative")
    return sum(acceptance**i for i in range(drafts + 1))


def speedup(acceptance: float, drafts: int, cost: float) -> float:
    if cost < 0:
        raise ValueError(f"cost={cost} must not be negative; it is the cost of a draft step in passes of the target")
    return expected_tokens(acceptance, drafts) / (1 + drafts * cost)


def best_drafts(acceptance: float, cost: float, max_drafts: int = 64) -> int:
    """The number of draft tokens per pass with the largest speed-up; 0 if speculation is never faster."""
    return max(range(max_drafts + 1), key=lambda drafts: speedup(acceptance, drafts, cost))
