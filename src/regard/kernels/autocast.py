"""Where sums must not be done in half precision, whatever autocast the caller runs under."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Products in here keep the dtype of their inputs; a device without autocast needs nothing."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()
