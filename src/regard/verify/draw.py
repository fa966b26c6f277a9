"""Weights for a model that has none yet: drawn wide, so that a wrong mask, position or state cannot hide.

Freshly initialized attention is nearly uniform, and its norms and biases do nothing. Here scores spread over several
units, norms lie around one and biases too. A deep stack of such layers is chaotic, and float32 would show chaos instead
of mistakes: the deeper, the narrower they are drawn.
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
