"""The length of sequences at which the masks of a model have an effect: a window of 256 masks nothing in 24 tokens."""

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
    """A length at which every mask has an effect, except masks that would take much longer than a minute to test."""
    affordable = min(MAX_LENGTH, MAX_WORK // sum(parameter.numel() for parameter in model.parameters()))
    needed = [first_effect(mask) + EXTRA for mask in masks(spec)]
    return max([MIN_LENGTH, *(length for length in needed if length <= affordable)])


def ineffective_masks(spec: Spec, length: int) -> dict[Mask, int]:
    """The masks that have no effect in sequences of this length, and the length that would test each."""
    return {mask: first_effect(mask) + EXTRA for mask in masks(spec) if first_effect(mask) > length}


def first_effect(mask: Mask) -> int:
    """The length of the shortest sequence in which the mask excludes a key that is not after its query.

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
    return {part for part in nested_specs(spec) if isinstance(part, Mask) and not isinstance(part, Causal | Full)}


def nested_specs(spec: Spec) -> Iterator[Spec]:
    """The spec and all specs inside it."""
    yield spec
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Spec):
                yield from nested_specs(item)
