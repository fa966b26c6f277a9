"""Attention of recurrent models, before the transformer: scores between states, and the weighted mean of the states.

    additive   vᵀ tanh(W_q s_i + W_k h_j)        Bahdanau et al. 2014
    dot        s_iᵀ h_j                          Luong et al. 2015
    general    s_iᵀ W h_j                        Luong et al. 2015
    scaled     s_iᵀ h_j / √E                     Vaswani et al. 2017

    α_ij = softmax_j(score)        c_i = Σ_j α_ij h_j        out = W_o c

Keys and values are the states h, split into heads: those of this sequence, or of a source (an encoder's states). W_k h
is computed once per state and cached with it. With `combine` the output is tanh(W_o c + W_s s), Luong's attentional
state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from regard.kernels.attention import backend
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal, Full, Mask, attention_mask
from regard.kernels.attention.reference import normalize, weights_of_heads
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.split_heads import divisors, merge_heads, split_heads
from regard.parts.state import STATELESS, PerSource, PerToken, State
from regard.parts.tap import Tap, attend_with_taps, normalize_with_taps
from regard.spec import SpecError, require


@dataclass(frozen=True)
class ScoredAttention(Body):
    mixes: ClassVar[bool] = True

    heads: int = 1
    score: Literal["additive", "dot", "general", "scaled"] = "additive"
    score_dim: int | None = None  # per head, of the hidden layer of "additive"; None: width of h / heads
    source: bool = False  # attend to a source instead of the same sequence
    source_width: int | None = None  # None: as wide as this stack
    mask: Mask | None = None  # None: Full() for a source, else the model's, as in Attention
    combine: bool = False

    def check(self) -> None:
        require(self.heads > 0, f"scored_attention: heads={self.heads} must be positive")
        require(
            self.score_dim is None or self.score_dim > 0,
            f"scored_attention: score_dim={self.score_dim} must be positive",
        )
        require(
            self.score_dim is None or self.score == "additive",
            f"scored_attention: score={self.score!r} has no hidden layer; leave score_dim={self.score_dim} out",
        )
        require(
            self.source or self.source_width is None,
            f"scored_attention: source_width={self.source_width} needs a source; set source=True, or leave it out",
        )
        require(
            not self.source or self.mask in (None, Full()),
            f"scored_attention: queries attend to the whole source; found mask={self.mask}, leave it out",
        )

    @property
    def causal(self) -> bool:
        return self.source or self.mask is None or self.mask.causal

    @property
    def bias_heads(self) -> int | None:
        return None if self.source else self.heads

    def with_default_mask(self, mask: Mask) -> Self:
        return self if self.source else super().with_default_mask(mask)

    def sizes(self, width: int) -> tuple[int, int, int]:
        """(width of h, width per head, score_dim)"""
        states_width = self.source_width or width
        if states_width % self.heads:
            raise SpecError(
                f"scored_attention: the width of the states, {states_width}, is not divisible by heads={self.heads}; "
                f"choose one of {', '.join(map(str, divisors(states_width)))}"
            )
        require(
            states_width == width or self.score in ("additive", "general"),
            f"scored_attention: score={self.score!r} multiplies states of widths {width} and {states_width}; "
            "choose 'general'",
        )
        head_dim = states_width // self.heads
        return states_width, head_dim, self.score_dim or head_dim

    def build(self, width: int) -> nn.Module:
        return self.module(width, width)

    def module(self, width: int, out: int) -> "ScoredAttentionModule":
        """The module for states of this width, with outputs of the width `out`."""
        return (AdditiveModule if self.score == "additive" else MultiplicativeModule)(width, self, out)

    def memory(self, width: int) -> PerSource | PerToken:
        _, head_dim, score_dim = self.sizes(width)
        arrays = {"h": (self.heads, head_dim)}
        if self.score == "additive":
            arrays["k"] = (self.heads, score_dim)
        mask = self.mask or Causal()
        if self.source:
            return PerSource(arrays)
        return PerToken(arrays, mask.sliding_window, mask.first_tokens, rotated=(), relative=mask.relative)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        states_width, _, score_dim = self.sizes(width)
        hidden = self.heads * score_dim
        q = {"additive": width * hidden, "general": width * states_width}.get(self.score, 0)
        k = states_width * hidden if self.score == "additive" else 0
        pair = (hidden if self.score == "additive" else states_width) + states_width
        out = (states_width + width if self.combine else states_width) * width
        return 2 * (tokens * (q + out + keys * pair) + (keys if self.source else tokens) * k)


class ScoredAttentionModule(nn.Module):
    """The cached states and the output projection; a subclass computes the scores."""

    def __init__(self, width: int, spec: ScoredAttention, out: int):
        super().__init__()
        self.heads, self.source, self.reads_source = spec.heads, spec.source, spec.source
        self.attention_taps: tuple[str, ...] = ("q", "k")
        self.states_width, self.head_dim, self.score_dim = spec.sizes(width)
        self.mask = spec.mask or (Full() if spec.source else Causal())
        self.q, self.k, self.scores, self.pattern, self.z = Tap(), Tap(), Tap(), Tap(), Tap()
        self.o_proj = nn.Linear(self.states_width, out, bias=False)
        self.s_proj = nn.Linear(width, out, bias=False) if spec.combine else None

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        *states, layout = (
            state.read_source(layout, self.cached_arrays)
            if self.source
            else state.extend(layout, **self.cached_arrays(x))
        )
        return self.output(x, layout, *states)

    def output(self, x: Tensor, layout: TokenLayout, *states: Tensor) -> Tensor:
        """x (B, L, D) and the cached arrays -> (B, L, out)"""
        c = self.o_proj(merge_heads(self.z(self.context(x, layout, *states))))
        return c if self.s_proj is None else torch.tanh(c + self.s_proj(x))

    def cached_arrays(self, h: Tensor) -> dict[str, Tensor]:
        """The arrays (B, H, S, …) that are cached for states (B, S, D)."""
        return {"h": split_heads(h, self.heads)}

    def context(self, x: Tensor, layout: TokenLayout, *states: Tensor) -> Tensor:
        """x (B, L, D) and the cached arrays -> the context vectors c (B, H, L, E)"""
        raise NotImplementedError

    def key_layout(self, layout: TokenLayout) -> TokenLayout:
        """The layout with the keys of the scores, from the layout that the module was called with."""
        source = layout.inputs.source
        return layout.cross(source.layout) if self.source and source is not None else layout


class MultiplicativeModule(ScoredAttentionModule):
    def __init__(self, width: int, spec: ScoredAttention, out: int):
        super().__init__(width, spec, out)
        self.q_proj = nn.Linear(width, self.states_width, bias=False) if spec.score == "general" else None
        self.scale = self.head_dim**-0.5 if spec.score == "scaled" else 1.0
        self.attend = backend("auto")

    def context(self, x: Tensor, layout: TokenLayout, *states: Tensor) -> Tensor:
        s, (h,) = x if self.q_proj is None else self.q_proj(x), states
        q, k = self.q(split_heads(s, self.heads)), self.k(h)
        return attend_with_taps(self, q, k, h, layout, self.score_options(layout))  # (B, H, L, E)

    def score_options(self, layout: TokenLayout) -> ScoreOptions:
        return ScoreOptions(self.mask, self.scale, layout.inputs.bias)

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        layout = self.key_layout(layout)
        return weights_of_heads(taps["q"], taps["k"], layout, self.score_options(layout), heads)


class AdditiveModule(ScoredAttentionModule):
    def __init__(self, width: int, spec: ScoredAttention, out: int):
        super().__init__(width, spec, out)
        self.q_proj = nn.Linear(width, self.heads * self.score_dim, bias=False)
        self.k_proj = nn.Linear(self.states_width, self.heads * self.score_dim, bias=False)
        self.v = nn.Parameter(torch.empty(self.heads, self.score_dim).normal_(std=self.score_dim**-0.5))

    def cached_arrays(self, h: Tensor) -> dict[str, Tensor]:
        return super().cached_arrays(h) | {"k": split_heads(self.k_proj(h), self.heads)}

    def context(self, x: Tensor, layout: TokenLayout, *states: Tensor) -> Tensor:
        q, (h, k) = split_heads(self.q_proj(x), self.heads), states  # (B, H, L, A), (B, H, S, E), (B, H, S, A)
        s = self.pair_scores(self.q(q), self.k(k), layout)
        return normalize_with_taps(self, s, attention_mask(self.mask, layout)).to(h.dtype) @ h

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        return self.weights(taps["q"], taps["k"], self.key_layout(layout))[:, heads]

    def weights(self, q: Tensor, k: Tensor, layout: TokenLayout) -> Tensor:
        """(B, H, L, S)"""
        return normalize(self.pair_scores(q, k, layout), attention_mask(self.mask, layout))

    def pair_scores(self, q: Tensor, k: Tensor, layout: TokenLayout) -> Tensor:
        """(B, H, L, S); the hidden layer is computed for every pair, so memory grows as L · S · A."""
        s = torch.einsum("bhlsa,ha->bhls", torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)), self.v)
        s, bias = s.to(torch.promote_types(s.dtype, torch.float32)), layout.inputs.bias
        return s if bias is None else s + bias.values(layout, s.dtype)
