"""Random weights for tests, wide enough that a wrong mask, position or state changes the output.

With ordinary initialization attention is nearly uniform, norms are one and biases zero. Here scores spread over several
units, and norms and biases are random around one. A deep stack of such layers amplifies float32 rounding, so deeper
stacks get narrower weights.
"""

import torch
from torch import nn

from regard.models.stack import Stack


@torch.no_grad()
def draw_wide(model: nn.Module, seed: int = 0) -> None:
    depth = sum(len(stack.blocks) for stack in model.modules() if isinstance(stack, Stack))
    spread = 1.5 * (4 / max(4, depth)) ** 0.25
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        wide = drawn * spread / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.3 * drawn
        parameter.copy_(wide)
