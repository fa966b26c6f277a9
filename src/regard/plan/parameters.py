"""Parameters by part, counted on the modules themselves, built on the meta device: any size, no memory.

Each tensor is counted once, where it is first used: a tied head has none of its own. Of experts a token uses a few;
the rest are inactive for it, though they must be kept, and so are blocks that only training uses.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from regard.models.meta_device import meta_device
from regard.models.stack import Stack
from regard.plan.parts import Planned, all_bodies, bodies, halves

# What a child is, its bodies aside.
NAMES = {"input": "embedding", "widen": "embedding", "embedding_norm": "norm", "stack": "norm", "narrow": "head"}


@dataclass(frozen=True)
class Parameters:
    parts: dict[str, int]
    inactive: int  # of these, what one token does not use

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def active(self) -> int:
        return self.total - self.inactive


def count_parameters(spec: Planned) -> Parameters:
    with meta_device():
        model = spec.build()
    counts, counted = Counter(), set()

    def count(part: str, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter not in counted:
                counted.add(parameter)
                counts[part.strip()] += parameter.numel()

    modules = {name: model.get_submodule(name) for name in halves(spec)}
    uses = Counter(parameter for module in modules.values() for parameter in module.parameters())
    count("embedding", [parameter for parameter, times in uses.items() if times > 1])  # one table for both halves
    for name, half in halves(spec).items():
        stack = modules[name].get_submodule("stack")
        assert isinstance(stack, Stack)
        sublayers = [sublayer for block in stack.blocks for sublayer in block.get_submodule("sublayers").children()]
        for body, sublayer in zip(bodies(half), sublayers, strict=True):
            count(f"{name} {body.kind}", sublayer.get_submodule("body").parameters())
        for child, module in modules[name].named_children():
            count(f"{name} {NAMES.get(child, child)}", module.parameters())
    for child, module in model.named_children():
        count(child, module.parameters())
    count("rest", model.parameters())
    inactive = sum(body.inactive_params(width) for body, width in all_bodies(spec)) + counts["ahead"]
    return Parameters({part: number for part, number in counts.items() if number}, inactive)
