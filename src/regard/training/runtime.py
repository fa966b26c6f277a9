"""How the same model is run on this machine: in which precision, compiled or not. No checkpoint knows of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from regard.compat import cannot_compile

Precision = Callable[[], AbstractContextManager]


def autocast(precision: str, device: torch.device) -> Precision:
    """A context to compute the loss in. Weights stay float32; on CUDA products run in bfloat16."""
    if precision == "bfloat16" and device.type != "cuda":
        raise ValueError("precision='bfloat16' needs a CUDA device (CPUs emulate it, slowly); use 'auto' or 'float32'")
    if precision == "float32" or device.type != "cuda":
        return nullcontext
    return partial(torch.autocast, "cuda", dtype=torch.bfloat16)


def compiled(model: nn.Module, device: torch.device, say: Callable[[str], None]) -> nn.Module:
    """The model through torch.compile, with the same parameters; eager where that cannot be, and then it says why."""
    reason = cannot_compile(device)
    if reason is not None:
        say(reason)
        return model
    fast = torch.compile(model)
    assert isinstance(fast, nn.Module)
    return fast
