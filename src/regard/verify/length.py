"""How long texts must be for a model's masks to be felt: a window of 256 hides nothing from a text of 24 tokens."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from regard.kernels.attention.mask import Causal, Full, Mask
from regard.spec import Spec

LEAST, MOST = 24, 512
BEHIND = 8  # tokens that stand where the mask is felt
WORK = 2_000_000_000  # parameters times tokens of a text: about a minute on two cores
FAR = 4096


def enough(model: nn.Module, spec: Spec) -> int:
    """A length at which as many masks are felt as can be in about a minute."""
    affordable = min(MOST, WORK // sum(parameter.numel() for parameter in model.parameters()))
    needed = [felt_at(mask) + BEHIND for mask in masks(spec)]
    return max([LEAST, *(length for length in needed if length <= affordable)])


def unfelt(spec: Spec, length: int) -> dict[Mask, int]:
    """The masks that hide nothing from texts this long, and how long one would have to be."""
    return {mask: felt_at(mask) + BEHIND for mask in masks(spec) if felt_at(mask) > length}


def felt_at(mask: Mask) -> int:
    """The shortest text of which it hides something that is not later; past FAR nobody looks."""
    for length in (64, 512, FAR):
        places = torch.arange(length)
        q, k = places.unsqueeze(-1), places.unsqueeze(0)
        seen = mask.allows(q, k)
        assert seen is not None
        hidden = (~seen & (k <= q)).any(-1)  # (length,)
        if hidden.any():
            return int(hidden.int().argmax()) + 1
    return FAR + 1


def masks(spec: Spec) -> set[Mask]:
    """Those that hide more than what is later."""
    return {part for part in parts(spec) if isinstance(part, Mask) and not isinstance(part, Causal | Full)}


def parts(spec: Spec) -> Iterator[Spec]:
    """The spec and all that it is made of."""
    yield spec
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Spec):
                yield from parts(each)
