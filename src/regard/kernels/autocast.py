"""Switch autocast off for sums, and apply it to products that it does not cover."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context without autocast. The meta device has no autocast, and querying it there breaks compiled graphs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_like_linear(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype to which autocast casts the inputs of a matrix product; unchanged without autocast."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
