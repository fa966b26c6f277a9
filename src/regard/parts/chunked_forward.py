"""A long text read in spans: a recurrent layer goes through one after another, carrying along what it remembers.

Chunked = whole is a law of every recurrence, so this changes no result. It changes where the numbers lie: what a layer
computes between its projections fits in a processor's cache for a thousand tokens, and not for sixteen thousand. Time
then grows with the text and no faster, and memory hardly grows at all. GPUs are given everything at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.layout import TokenLayout

SPAN = 1024  # tokens


def chunked_forward(
    layer: Callable[..., tuple[Tensor, ...]], x: Tensor, layout: TokenLayout, carried: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """layer(x, at, *carried) -> (y, *carried), of x (B, L, D) in spans; packed documents are read at once."""
    if x.device.type != "cpu" or x.shape[1] <= SPAN or layout.segments is not None:
        return layer(x, layout, *carried)
    ys = []
    for start in range(0, x.shape[1], SPAN):
        y, *carried = layer(x[:, start : start + SPAN], layout.tokens(slice(start, start + SPAN)), *carried)
        ys.append(y)
    return torch.cat(ys, 1), *carried
