"""How long sequences must be for the masks of a model to matter: a window of 256 masks nothing in 24 tokens."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from regard.kernels.attention.mask import Causal, Full, Mask
from regard.spec import Spec

MIN_LENGTH, MAX_LENGTH = 24, 512
EXTRA = 8  # tokens after the first one that the mask affects
MAX_WORK = 2_000_000_000  # parameters times tokens: about a minute on two cores
MAX_SEARCHED = 4096


def sufficient_length(model: nn.Module, spec: Spec) -> int:
    """The length at which as many masks mask something as can be tested in about a minute."""
    affordable = min(MAX_LENGTH, MAX_WORK // sum(parameter.numel() for parameter in model.parameters()))
    needed = [first_effect(mask) + EXTRA for mask in masks(spec)]
    return max([MIN_LENGTH, *(length for length in needed if length <= affordable)])


def ineffective_masks(spec: Spec, length: int) -> dict[Mask, int]:
    """The masks that mask nothing in sequences of this length, and the length that would test each."""
    return {mask: first_effect(mask) + EXTRA for mask in masks(spec) if first_effect(mask) > length}


def first_effect(mask: Mask) -> int:
    """The length of the shortest sequence in which the mask excludes a key that is not later.

    Returns MAX_SEARCHED + 1 if there is none up to MAX_SEARCHED.
    """
    for length in (64, 512, MAX_SEARCHED):
        positions = torch.arange(length)
        q, k = positions.unsqueeze(-1), positions.unsqueeze(0)
        allowed = mask.allows(q, k)
        assert allowed is not None
        masked = (~allowed & (k <= q)).any(-1)  # (length,)
        if masked.any():
            return int(masked.int().argmax()) + 1
    return MAX_SEARCHED + 1


def masks(spec: Spec) -> set[Mask]:
    """The masks other than causal and full."""
    return {part for part in parts(spec) if isinstance(part, Mask) and not isinstance(part, Causal | Full)}


def parts(spec: Spec) -> Iterator[Spec]:
    """The spec and all specs inside it."""
    yield spec
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Spec):
                yield from parts(each)
