"""Linear attention as a mixer: attention whose memory does not grow.

    out_t = S_tᵀ φ(q_t) / z_tᵀ φ(q_t)          S_t = Σ φ(k_j) v_jᵀ      z_t = Σ φ(k_j)      over j ≤ t, or all j

The feature map φ is chosen (parts/feature_maps.py); the sums are a linear scan. Without `normalize` the divisor is left
out, and the output's scale is the next layer's matter. Katharopoulos et al. 2020; Choromanski et al. 2020.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.random_features import document_peak, draw_directions, log_features, running_peak
from regard.kernels.recurrent.linear_attention import bidirectional_linear_attention, linear_attention
from regard.kernels.recurrent.linear_scan import flops
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.feature_maps import EluFeatures, FeatureMap, PerformerFeatures
from regard.parts.heads import head_dim_of, merge_heads, split_heads
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.spec import require


@dataclass(frozen=True)
class LinearAttention(Body):
    mixes: ClassVar[bool] = True

    heads: int
    bias: bool = False
    features: FeatureMap = EluFeatures()
    normalize: bool = True
    bidirectional: bool = False  # does a token see later ones too?

    def check(self) -> None:
        require(self.heads > 0, f"linear_attention: heads={self.heads} must be positive")
        self.features.check_use(self.normalize)

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    def sizes(self, width: int) -> tuple[int, int, int]:
        """(head_dim, features, columns of the sums) of a head."""
        head_dim = head_dim_of(self.kind, width, self.heads)
        return head_dim, self.features.size(head_dim), head_dim + self.normalize

    def check_width(self, width: int) -> None:
        self.sizes(width)

    def build(self, width: int) -> nn.Module:
        return (
            PerformerModule(width, self) if isinstance(self.features, PerformerFeatures) else LinearModule(width, self)
        )

    def memory(self, width: int) -> FixedSize | None:
        if self.bidirectional:
            return None
        _, features, columns = self.sizes(width)
        peak = {"peak": (self.heads,)} if isinstance(self.features, PerformerFeatures) else {}
        return FixedSize({"sums": (self.heads, features, columns)} | peak)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        head_dim, features, columns = self.sizes(width)
        drawn = 4 * tokens * width * features if isinstance(self.features, PerformerFeatures) else 0
        if self.bidirectional:
            summed = 4 * tokens * self.heads * features * columns
        else:
            summed = flops(features, columns, tokens, self.heads)
        return 8 * tokens * width * width + drawn + summed


class LinearAttentionModule(nn.Module):
    """What all feature maps share: the four projections."""

    def __init__(self, width: int, spec: LinearAttention):
        super().__init__()
        self.heads, self.normalize, self.memory = spec.heads, spec.normalize, spec.memory(width)
        self.q_proj = nn.Linear(width, width, bias=spec.bias)
        self.k_proj = nn.Linear(width, width, bias=spec.bias)
        self.v_proj = nn.Linear(width, width, bias=spec.bias)
        self.o_proj = nn.Linear(width, width, bias=spec.bias)

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads)  # (B, H, L, E)
        k = split_heads(self.k_proj(x), self.heads)  # (B, H, L, E)
        v = split_heads(self.v_proj(x), self.heads)  # (B, H, L, E)
        return self.o_proj(merge_heads(self.read(q, k, v, layout, state).to(x.dtype)))

    def read(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: FixedState) -> Tensor:
        """(B, H, L, E) what the queries find in the sums"""
        raise NotImplementedError


class LinearModule(LinearAttentionModule):
    def __init__(self, width: int, spec: LinearAttention):
        super().__init__(width, spec)
        self.elu = isinstance(spec.features, EluFeatures)

    def read(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: FixedState) -> Tensor:
        q, k = self.map(q), self.map(k)
        if self.memory is None:
            return bidirectional_linear_attention(q, k, v, layout.documents, layout.valid, self.normalize)
        (sums,) = state.read(layout, **self.memory.zeros(v))  # (B, H, E, columns)
        out, sums = linear_attention(q, k, v, sums, layout.documents, layout.valid, normalize=self.normalize)
        state.write(layout, sums=sums)
        return out

    def map(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1 if self.elu else x


class PerformerModule(LinearAttentionModule):
    """Features relative to the largest seen so far, kept beside the sums: the division cancels it."""

    def __init__(self, width: int, spec: LinearAttention):
        super().__init__(width, spec)
        head_dim, features, _ = spec.sizes(width)
        self.directions = nn.Parameter(draw_directions(features, head_dim), requires_grad=False)  # (R, E)

    def read(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: FixedState) -> Tensor:
        q, k = log_features(q, self.directions), log_features(k, self.directions)  # (B, H, L, R)
        q = (q - q.amax(-1, keepdim=True).detach()).exp()
        k = k if layout.valid is None else k.masked_fill(~layout.valid[:, None, :, None], -torch.inf)
        if self.memory is None:
            return bidirectional_linear_attention(
                q, (k - document_peak(k, layout.documents).unsqueeze(-1)).exp(), v, layout.documents
            )
        zeros = self.memory.zeros(v)
        sums, peak = state.read(
            layout, sums=zeros["sums"], peak=zeros["peak"] - torch.inf
        )  # (B, H, R, columns), (B, H)
        peaks, decay, peak = running_peak(k, peak, layout.documents)
        k = (k - peaks.unsqueeze(-1)).exp()
        out, sums = linear_attention(q, k, v, sums, layout.documents, layout.valid, decay)
        state.write(layout, sums=sums, peak=peak)
        return out
