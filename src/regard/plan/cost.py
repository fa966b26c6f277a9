"""What a spec costs, in numbers, without a single weight.

    weights     counted on the modules themselves, built on the meta device
    FLOPs       2 for each multiply-add of a matrix product; training 3 times the forward (the backward is two of them)
    KV cache    Σ over layers of heads · dim, of keys and of values, for each token; recurrent states once a text
    training    float32 weights, their gradients and AdamW's two moments

Activations are not counted: they depend on the kernels and on what is recomputed.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from regard.models.blank import blank
from regard.models.decoder import Decoder
from regard.parts.state import Fixed, PerToken
from regard.spec import nearest

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PREFIXES = {1000: ["", "k", "M", "G", "T", "P"], 1024: ["", "Ki", "Mi", "Gi", "Ti", "Pi"]}


@dataclass(frozen=True)
class Plan:
    """The numbers of one spec for texts of `context` tokens, `batch` at a time, weights and cache in `dtype`."""

    spec: Decoder
    context: int
    batch: int
    dtype: str
    parts: dict[str, int]  # parameters by part; a tied head has none of its own

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    def weight_bytes(self, dtype: str) -> int:
        return self.parameters * DTYPES[dtype].itemsize

    def flops(self, tokens: int, seen: int) -> int:
        """Of one forward of this many tokens, each before `seen` keys."""
        bodies = [sublayer.body for block in self.spec.blocks for sublayer in block.sublayers]
        head = 2 * tokens * self.spec.width * self.spec.vocab
        return sum(body.flops(self.spec.width, tokens, seen) for body in bodies) + head

    @property
    def forward_flops(self) -> int:
        """A token, when a whole text of `context` is read at once."""
        return self.flops(self.context, self.context) // self.context

    @property
    def decode_flops(self) -> int:
        """A token, the last of a text of `context`, when the others are remembered."""
        return self.flops(1, self.context)

    @property
    def training_flops(self) -> int:
        """A token, forward and backward."""
        return 3 * self.flops(self.context, self.context) // self.context

    @property
    def kv_bytes_per_token(self) -> int:
        declared = [memory for block in self.spec.memory() for memory in block if isinstance(memory, PerToken)]
        return sum(prod(size) for memory in declared for size in memory.arrays.values()) * DTYPES[self.dtype].itemsize

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_token * self.context * self.batch

    @property
    def state_bytes(self) -> int:
        """Recurrent states, the same for a text of any length; kept in at least float32."""
        wide = torch.promote_types(DTYPES[self.dtype], torch.float32)
        declared = [memory for block in self.spec.memory() for memory in block if isinstance(memory, Fixed)]
        return sum(prod(memory.shape) for memory in declared) * wide.itemsize * self.batch

    @property
    def training_bytes(self) -> dict[str, int]:
        weights = self.weight_bytes("float32")
        return {"weights": weights, "gradients": weights, "moments": 2 * weights}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "parameters": {"total": self.parameters} | self.parts,
            "weight_bytes": {dtype: self.weight_bytes(dtype) for dtype in DTYPES},
            "flops_per_token": {
                "forward": self.forward_flops,
                "decode": self.decode_flops,
                "training": self.training_flops,
            },
            "memory_bytes": {
                "kv_per_token": self.kv_bytes_per_token,
                "kv": self.kv_bytes,
                "states": self.state_bytes,
            },
            "training_bytes": {"total": sum(self.training_bytes.values())} | self.training_bytes,
        }

    def table(self) -> list[tuple[str, str, str]]:
        """Rows of (group, quantity, amount), for people."""
        units = {"parameters": ("", 1000), "flops_per_token": ("FLOP", 1000)}
        groups = {name: values for name, values in self.to_dict().items() if isinstance(values, dict)}
        return [
            (group.replace("_", " "), quantity.replace("_", " "), amount(number, *units.get(group, ("B", 1024))))
            for group, values in groups.items()
            for quantity, number in values.items()
        ]


def plan(spec: Decoder, context: int | None = None, batch: int = 1, dtype: str = "float32") -> Plan:
    """The numbers of a spec; `context` is the spec's own unless given."""
    context = spec.context if context is None else context
    if context is None:
        raise ValueError("this spec names no context; say for which length to plan, for example context=2048")
    for name, count in (("context", context), ("batch", batch)):
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    if dtype not in DTYPES:
        raise ValueError(f"there is no dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    return Plan(spec, context, batch, dtype, count_parts(spec))


def count_parts(spec: Decoder) -> dict[str, int]:
    """Parameters by part, each tensor once, where it is first used."""
    model = blank(spec)
    counts, counted = Counter(), set()

    def count(part: str, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter not in counted:
                counted.add(parameter)
                counts[part] += parameter.numel()

    count("embedding", model.embedding)
    count("position", model.position)
    for i, block in enumerate(spec.blocks):
        for j, sublayer in enumerate(block.sublayers):
            built = model.get_submodule(f"stack.blocks.{i}.sublayers.{j}")
            count(sublayer.body.kind, built.get_submodule("body"))
            count("norm", built.get_submodule("norm"))
    count("norm", model.norm)
    count("head", model.head)
    return dict(counts)


def amount(number: int, unit: str, step: int) -> str:
    """12_345_678, "B", 1024 -> '11.8 MiB'"""
    scaled, prefixes = float(number), PREFIXES[step]
    while scaled >= step and len(prefixes) > 1:
        scaled, prefixes = scaled / step, prefixes[1:]
    digits = f"{scaled:.3g}" if scaled < 999.5 else f"{scaled:.0f}"
    return f"{digits} {prefixes[0]}{unit}".rstrip()
