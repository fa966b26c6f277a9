"""LoRA in numbers: an adapter of rank r on a linear layer (out, in) has r·(in + out) weights.

Which layers exist is asked of the modules themselves, built without memory, so shared key and value heads count as
narrow as they are. What an adapter can hold is about 2 bits a weight (Allen-Zhu & Li 2024); what reinforcement teaches
is about one bit an episode, so a small adapter is room enough (Schulman et al. 2025, "LoRA without regret").
"""

from collections.abc import Iterable

from torch import nn

from regard.models.meta_device import meta_device
from regard.plan.parts import Planned
from regard.plan.training import full_bytes, lora_bytes
from regard.spec import nearest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEEDFORWARD = ("gate_proj", "up_proj", "down_proj")
BITS_PER_WEIGHT = 2


def lora_parameters(spec: Planned, rank: int, targets: Iterable[str] = ("q_proj", "v_proj")) -> int:
    return sum(adapter_parameters(rank, *shape) for shape in adapted(spec, targets).values())


def adapter_parameters(rank: int, inputs: int, outputs: int) -> int:
    return rank * (inputs + outputs)


def adapted(spec: Planned, targets: Iterable[str]) -> dict[str, tuple[int, int]]:
    """(in, out) of every linear layer whose name ends in a target."""
    with meta_device():
        linears = {name: m for name, m in spec.build().named_modules() if isinstance(m, nn.Linear)}
    ends = {name.rpartition(".")[2] for name in linears}
    for target in targets:
        if target not in ends:
            raise ValueError(f"no linear layer is named {target!r}; {nearest(target, ends)}")
    chosen = {name: m for name, m in linears.items() if name.rpartition(".")[2] in set(targets)}
    return {name: (m.in_features, m.out_features) for name, m in chosen.items()}


def episode_bits(problems: int, samples: int, bits: float = 1.0) -> float:
    """What reinforcement can teach at most: a reward of this many bits for each sample of each problem."""
    return problems * samples * bits


def lora_plan(spec: Planned, parameters: int, rank: int, targets: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Groups for a plan: the adapter's size beside its base, and training it beside training everything."""
    shapes = adapted(spec, targets)
    adapters = sum(adapter_parameters(rank, *shape) for shape in shapes.values())
    return {
        "lora": {
            "rank": rank,
            "layers": len(shapes),
            "parameters": adapters,
            "times_smaller": parameters / adapters,
            "capacity_bits": BITS_PER_WEIGHT * adapters,
        },
        "lora_bytes": {
            "adapter_in_float16": 2 * adapters,
            "training_all": sum(full_bytes(parameters).values()),
            "training_lora": sum(lora_bytes(parameters, adapters).values()),
            "training_qlora": sum(lora_bytes(parameters, adapters, "nf4").values()),
        },
    }
