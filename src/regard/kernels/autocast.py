"""Autocast where it must not act, and where it would not: for sums, and for products that it does not know."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Products in here keep the dtype of their inputs. The meta device knows no autocast, and asking breaks graphs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_like_linear(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast would hand them to a matrix product; as they are where there is none."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
