"""Where sums must not be done in half precision, whatever autocast the caller runs under."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Products in here keep the dtype of their inputs. The meta device knows no autocast, and asking breaks graphs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
