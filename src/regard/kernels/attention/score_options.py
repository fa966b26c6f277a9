"""How scores are made of queries and keys, and how they become weights: the data that every backend reads.

    s_ij = cap(scale · q_i·k_j) + bias_ij        cap(s) = c · tanh(s / c)
    w_ij = exp(s_ij) / (Σ_j' exp(s_ij') + exp(sink))        over the keys j' that the mask lets i see

A cap keeps scores finite however long queries grow (Gemma 2). A sink is a score a head with no value behind it: a query
that needs nothing can say so (GPT-OSS; Miller 2023, "attention is off by one").
"""

from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention.bias import Bias
from regard.kernels.attention.mask import Mask


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    mask: Mask
    scale: float = 1.0
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)
    dropout: float = 0.0  # share of the weights that are dropped; the caller gives it in training only
