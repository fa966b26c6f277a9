"""Activation checkpointing: less memory for more computation. Chen et al. 2016.

The backward of a module needs the intermediate results of its forward. A checkpointed module keeps only its inputs, and
its forward runs again in the backward, with the same random numbers, so losses and gradients do not change. If all
blocks are checkpointed, memory falls to one hidden state per block and the intermediate results of a single block, and
a step takes about a third more time.

Modules are selected by patterns of their names, for example `stack.blocks.*` (all blocks of a decoder),
`stack.blocks.*[02468]` (every second one) or `*.sublayers.1.body` (the feed-forward layers). Of two matching modules of
which one contains the other, the outer one is checkpointed.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.training.parameter_groups import matching_names


def checkpoint_activations(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Checkpoint the modules whose names match a pattern; returns their names.

    Call it before the model is distributed and compiled. Names and values of the parameters stay the same.
    """
    containers = nn.ModuleList | nn.ModuleDict  # they have no forward
    modules = {name: module for name, module in model.named_modules() if name and not isinstance(module, containers)}
    matched = {
        name for pattern in patterns for name in matching_names(modules, pattern, "checkpoint_activations", "module")
    }
    outer = [name for name in modules if name in matched and not matched.intersection(parents(name))]
    for name in outer:
        module = modules[name]
        if not is_checkpointed(module):
            module.forward = partial(recomputed, module.forward)
    return outer


def is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module.forward, partial) and module.forward.func is recomputed


def parents(name: str) -> list[str]:
    """The names of the modules that contain the one of this name."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def recomputed(forward: Callable, *arguments: Any, **options: Any) -> Any:
    """Call the forward of a module; in training, it is called again in the backward."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    return checkpoint(forward, *arguments, use_reentrant=False, **options)
