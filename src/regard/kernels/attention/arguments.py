"""The arguments of every attention backend, and the description of a call by which a backend is chosen.

ScoreOptions: how scores are computed and normalized.

    s_ij = cap(scale · q_i·k_j) + bias_ij        cap(s) = c · tanh(s / c)
    w_ij = exp(s_ij) / (Σ_j' exp(s_ij') + exp(sink))        over the keys j' that the mask allows for query i

The softcap bounds the scores (Gemma 2). A sink is one more score per head, without a value: it lets the weights of a
query sum to less than 1 (GPT-OSS; Miller 2023, "Attention is off by one").

Pages: keys or values in the blocks of a pool, which a paged store passes to attention without copying them.

    token t of row b is in slot table[b, t // block] · block + t mod block

`decode` reads the pages in place; for every other backend they are gathered first. Kwon et al. 2023, PagedAttention.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.attention.bias import Slopes
from regard.kernels.attention.mask import Mask
from regard.layout import Bias, TokenLayout


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    mask: Mask
    scale: float = 1.0
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)
    dropout: float = 0.0  # probability of dropping a weight; callers set it in training only


@dataclass(frozen=True, eq=False)
class Pages:
    pool: Tensor  # (slots, heads, dim) of all rows
    table: Tensor  # (B, n) the blocks of each row, in order
    block: int  # slots per block

    def gather(self) -> Tensor:
        rows, heads, slots, dim = self.shape
        blocks = self.pool.view(-1, self.block * heads * dim)  # whole blocks are copied, not their elements
        return blocks.index_select(0, self.table.flatten()).view(rows, slots, heads, dim).transpose(1, 2)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of `gather()`."""
        rows, blocks = self.table.shape
        return rows, self.pool.shape[1], blocks * self.block, self.pool.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype

    @property
    def requires_grad(self) -> bool:
        return self.pool.requires_grad


Keys = Tensor | Pages  # keys or values


def gather_pages(x: Keys) -> Tensor:
    return x.gather() if isinstance(x, Pages) else x


class AttentionCall(NamedTuple):
    """Everything that the choice of a backend may depend on. It is hashable, so that a choice can be cached."""

    device: torch.device
    autocast: torch.dtype | None  # None: autocast is off
    q: tuple[int, ...]  # shapes: (B, H, L, E), (B, K, S, E), (B, K, S, Ev)
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  # of q, k and v
    needs_gradients: bool  # of q, k or v
    mask: Mask
    scale: float
    bias: type[Bias] | None
    learned_slopes: bool  # the bias is Slopes that require gradients
    softcap: float | None
    sinks: bool
    dropout: float
    own_keys: bool  # the keys are the queries' own tokens
    packed: bool  # several documents per row
    visible: bool  # keys that only some queries attend to, whatever the mask
    selects: bool  # a store chooses among the keys by their scores
    ordered: bool  # as in TokenLayout
    consecutive: bool


def describe(q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions) -> AttentionCall:
    device, device_type, bias = q.device, q.device.type, options.bias
    autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return AttentionCall(
        device, torch.get_autocast_dtype(device_type) if autocast else None,
        q.shape, k.shape, v.shape, (q.dtype, k.dtype, v.dtype),
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        options.mask, options.scale, None if bias is None else type(bias),
        isinstance(bias, Slopes) and bias.learned,
        options.softcap, options.sinks is not None, options.dropout,
        layout.keys is None, layout.segments is not None and layout.key_segments is not None,
        layout.key_visible is not None, layout.key_select is not None, layout.ordered, layout.consecutive,
    )  # fmt: skip
