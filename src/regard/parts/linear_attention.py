"""Linear attention: softmax's exp(q·k) is replaced by φ(q)·φ(k), so the state has a fixed size.

    out_t = S_tᵀ φ(q_t) / z_tᵀ φ(q_t)          S_t = Σ φ(k_j) v_jᵀ      z_t = Σ φ(k_j)      over j ≤ t, or all j

    elu         φ(x) = elu(x) + 1         positive, so the weights are positive          Katharopoulos et al. 2020
    performer   φ(x) = exp(w·x - |x|²/2)  random w: in expectation softmax               Choromanski et al. 2020
    identity    φ(x) = x                  scores of any sign, without normalization

The sums are a linear scan (kernels/recurrent/linear_attention.py). With normalize=False the output is not divided by
zᵀ φ(q).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.random_features import document_peak, draw_directions, log_features, running_peak
from regard.kernels.recurrent.implied_map import one_hot_values
from regard.kernels.recurrent.linear_attention import bidirectional_linear_attention, linear_attention
from regard.kernels.recurrent.linear_scan import flops
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.split_heads import head_dim_of, merge_heads, split_heads
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.parts.tap import MapKind, Tap
from regard.spec import Spec, require


@dataclass(frozen=True)
class FeatureMap(Spec):
    def size(self, head_dim: int) -> int:
        """Number of features per head."""
        return head_dim

    def check_use(self, normalize: bool) -> None:
        """Raise SpecError if this feature map does not support this value of `normalize`."""


@dataclass(frozen=True)
class EluFeatures(FeatureMap):
    pass


@dataclass(frozen=True)
class IdentityFeatures(FeatureMap):
    def check_use(self, normalize: bool) -> None:
        require(
            not normalize,
            "identity: scores may be negative and sum to zero, so they cannot be normalized; "
            "set normalize=False, or choose elu or performer",
        )


@dataclass(frozen=True)
class PerformerFeatures(FeatureMap):
    count: int | None = None  # random directions w; None: head_dim

    def check(self) -> None:
        require(self.count is None or self.count > 0, f"performer: count={self.count} must be positive")

    def size(self, head_dim: int) -> int:
        return self.count or head_dim

    def check_use(self, normalize: bool) -> None:
        require(normalize, "performer: it approximates softmax, whose weights sum to 1; leave normalize=False out")


@dataclass(frozen=True)
class LinearAttention(Body):
    mixes: ClassVar[bool] = True

    heads: int
    bias: bool = False
    features: FeatureMap = EluFeatures()
    normalize: bool = True
    bidirectional: bool = False  # queries also attend to later keys; set it in encoders

    def check(self) -> None:
        require(self.heads > 0, f"linear_attention: heads={self.heads} must be positive")
        self.features.check_use(self.normalize)

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    def sizes(self, width: int) -> tuple[int, int, int]:
        """Per head: (head_dim, features, columns of the sums)."""
        head_dim = head_dim_of(self.kind, width, self.heads)
        return head_dim, self.features.size(head_dim), head_dim + self.normalize

    def check_width(self, width: int) -> None:
        self.sizes(width)

    def build(self, width: int) -> nn.Module:
        performer = isinstance(self.features, PerformerFeatures)
        return PerformerModule(width, self) if performer else FeatureMapModule(width, self)

    def memory(self, width: int) -> FixedSize | None:
        if self.bidirectional:
            return None
        _, features, columns = self.sizes(width)
        peak = {"peak": (self.heads,)} if isinstance(self.features, PerformerFeatures) else {}
        return FixedSize({"sums": (self.heads, features, columns)} | peak)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        head_dim, features, columns = self.sizes(width)
        random = 4 * tokens * width * features if isinstance(self.features, PerformerFeatures) else 0
        if self.bidirectional:
            sums = 4 * tokens * self.heads * features * columns
        else:
            sums = flops(features, columns, tokens, self.heads)
        return 8 * tokens * width * width + random + sums


class LinearAttentionModule(nn.Module):
    """The projections; a subclass computes the features and the sums."""

    attention_taps: tuple[str, ...] = ("q", "k")
    reads_source = False

    def __init__(self, width: int, spec: LinearAttention):
        super().__init__()
        self.heads, self.normalize, self.memory = spec.heads, spec.normalize, spec.memory(width)
        self.q_proj = nn.Linear(width, width, bias=spec.bias)
        self.k_proj = nn.Linear(width, width, bias=spec.bias)
        self.v_proj = nn.Linear(width, width, bias=spec.bias)
        self.o_proj = nn.Linear(width, width, bias=spec.bias)
        self.q, self.k, self.v, self.z = Tap(), Tap(), Tap(), Tap()
        signed = isinstance(spec.features, IdentityFeatures)
        self.map_kind = MapKind("linear attention", signed=signed, normalized=spec.normalize)

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        q = self.q(split_heads(self.q_proj(x), self.heads))  # (B, H, L, E)
        k = self.k(split_heads(self.k_proj(x), self.heads))  # (B, H, L, E)
        v = self.v(split_heads(self.v_proj(x), self.heads))  # (B, H, L, E)
        return self.o_proj(merge_heads(self.z(self.attention(q, k, v, layout, state).to(x.dtype))))

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        q, k = taps["q"][:, heads], taps["k"][:, heads]
        return self.attention(q, k, one_hot_values(len(q), q.shape[1], q), layout, STATELESS)

    def empty_sums(self, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, N, columns) for features k (B, H, L, N) and values v (B, H, L, P)"""
        wide = torch.promote_types(v.dtype, torch.float32)
        return v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1] + self.normalize, dtype=wide)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: FixedState) -> Tensor:
        """The output of each head (B, H, L, E); updates the state."""
        raise NotImplementedError


class FeatureMapModule(LinearAttentionModule):
    def __init__(self, width: int, spec: LinearAttention):
        super().__init__(width, spec)
        self.elu = isinstance(spec.features, EluFeatures)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: FixedState) -> Tensor:
        q, k = self.features(q), self.features(k)
        if self.memory is None:
            return bidirectional_linear_attention(q, k, v, layout.documents, layout.valid, self.normalize)
        (sums,) = state.read(layout, sums=self.empty_sums(k, v))  # (B, H, E, columns)
        out, sums = linear_attention(q, k, v, sums, layout.documents, layout.valid, normalize=self.normalize)
        state.write(layout, sums=sums)
        return out

    def features(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1 if self.elu else x


class PerformerModule(LinearAttentionModule):
    """Random features, scaled by the largest so far to avoid overflow; the normalization cancels the scale."""

    def __init__(self, width: int, spec: LinearAttention):
        super().__init__(width, spec)
        head_dim, features, _ = spec.sizes(width)
        self.directions = nn.Parameter(draw_directions(features, head_dim), requires_grad=False)  # (R, E)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: FixedState) -> Tensor:
        q, k = log_features(q, self.directions), log_features(k, self.directions)  # (B, H, L, R)
        q = (q - q.amax(-1, keepdim=True).detach()).exp()
        k = k if layout.valid is None else k.masked_fill(~layout.valid[:, None, :, None], -torch.inf)
        if self.memory is None:
            return bidirectional_linear_attention(
                q, (k - document_peak(k, layout.documents).unsqueeze(-1)).exp(), v, layout.documents
            )
        zeros = self.empty_sums(k, v)
        peak = zeros.new_full(zeros.shape[:2], -torch.inf)
        sums, peak = state.read(layout, sums=zeros, peak=peak)  # (B, H, R, columns), (B, H)
        peaks, log_decay, peak = running_peak(k, peak, layout.documents)
        k = (k - peaks.unsqueeze(-1)).exp()
        out, sums = linear_attention(q, k, v, sums, layout.documents, layout.valid, log_decay)
        state.write(layout, sums=sums, peak=peak)
        return out
