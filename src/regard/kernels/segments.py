"""Documents that stand side by side in a row, counted: names of segments may be any numbers."""

import torch.nn.functional as F
from torch import Tensor


def numbered(segments: Tensor) -> Tensor:
    """(B, L) the documents of each row, counted from 0: a new one begins where the segment changes."""
    return F.pad((segments[:, 1:] != segments[:, :-1]).cumsum(1), (1, 0))
