"""How attention scores are computed and normalized; every backend takes these options.

    s_ij = cap(scale · q_i·k_j) + bias_ij        cap(s) = c · tanh(s / c)
    w_ij = exp(s_ij) / (Σ_j' exp(s_ij') + exp(sink))        over the keys j' that the mask allows for query i

The softcap bounds the scores (Gemma 2). A sink is one more score per head, without a value: it lets the weights of a
query sum to less than 1 (GPT-OSS; Miller 2023, "Attention is off by one").
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
    dropout: float = 0.0  # probability of dropping a weight; callers set it in training only
