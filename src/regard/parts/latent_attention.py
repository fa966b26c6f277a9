"""Multi-head latent attention (MLA): the keys and values of all heads are projections of one cached latent per token.

    c_t = norm(W_c x_t)        k_h,t = [U_h c_t ; RoPE(W_r x_t)]        v_h,t = V_h c_t        DeepSeek-V2, 2024

The cache holds rank + rope_dim numbers per token, for any number of heads. A rotation between queries and U_h would
prevent the absorbed form, so the rotated part of the key is separate and shared by all heads. Two forms are equivalent:

    expanded    q_h · U_h c        keys and values are computed from the latents: multi-head attention
    absorbed    U_hᵀ q_h · c       queries are projected to the latent space: multi-query attention to the latents

The form with fewer multiplications is chosen: expanded for many queries, absorbed for few queries and many keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.attention import backend
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal, Mask
from regard.kernels.attention.reference import weights_of_heads
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.norm import Norm, RMSNorm
from regard.parts.position.base import Position
from regard.parts.position.rope import Rope
from regard.parts.split_heads import merge_heads, split_heads
from regard.parts.state import STATELESS, PerToken, State
from regard.parts.tap import Tap, attend_with_taps
from regard.spec import require


@dataclass(frozen=True)
class LatentAttention(Body):
    mixes: ClassVar[bool] = True

    heads: int
    rank: int  # width of the latent
    nope_dim: int  # per head: the part of queries and keys that is not rotated
    rope_dim: int  # per head: the rotated part
    v_dim: int | None = None  # None: nope_dim
    query_rank: int | None = None  # width of a latent for the queries; None: they are projected from x
    position: Position = Rope(layout="interleaved")
    mask: Mask | None = None  # None: the model's, as in Attention
    norm: Norm = RMSNorm()  # of the latents
    bias: bool = False  # of the projections to the latents and of the output
    scale: float | None = None  # None: 1 / √(nope_dim + rope_dim)
    dropout: float = 0.0  # on the weights, in training

    def check(self) -> None:
        for name in ("heads", "rank", "nope_dim", "rope_dim", "v_dim", "query_rank"):
            size = getattr(self, name)
            require(size is None or size > 0, f"latent_attention: {name}={size} must be positive")
        require(0 <= self.dropout < 1, f"latent_attention: dropout={self.dropout} must be in [0, 1)")
        self.position.check_place("attention")

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.nope_dim

    def canonical(self, width: int) -> Self:
        scale = (self.nope_dim + self.rope_dim) ** -0.5 if self.scale is None else self.scale
        return replace(self, v_dim=self.value_dim, scale=scale)

    @property
    def causal(self) -> bool:
        return self.mask is None or self.mask.causal

    @property
    def bias_heads(self) -> int | None:
        return self.heads

    def build(self, width: int) -> nn.Module:
        return LatentAttentionModule(width, self)

    def memory(self, width: int) -> PerToken:
        arrays = {"latent": (1, self.rank), "k_rope": (1, self.rope_dim)}
        mask = self.mask or Causal()
        rotated = (("k_rope", self.position),)
        return PerToken(arrays, mask.sliding_window, mask.first_tokens, rotated=rotated, relative=mask.relative)

    def products(self, tokens: int, keys: int) -> dict[str, int]:
        """Multiplications per head from queries and latents to outputs, for each form."""
        up, pairs = self.rank * (self.nope_dim + self.value_dim), tokens * keys
        return {
            "expanded": keys * up + pairs * (self.nope_dim + self.rope_dim + self.value_dim),
            "absorbed": tokens * up + pairs * (self.rank + self.rope_dim + self.rank),
        }

    def absorbs(self, tokens: int, keys: int) -> bool:
        """Whether the absorbed form has fewer multiplications."""
        products = self.products(tokens, keys)
        return products["absorbed"] < products["expanded"]

    def flops(self, width: int, tokens: int, keys: int) -> int:
        q_dim = self.heads * (self.nope_dim + self.rope_dim)
        queries = self.query_rank * (width + q_dim) if self.query_rank else width * q_dim
        others = width * (self.rank + self.rope_dim + self.heads * self.value_dim)
        return 2 * (tokens * (queries + others) + self.heads * min(self.products(tokens, keys).values()))


class LatentAttentionModule(nn.Module):
    attention_taps: tuple[str, ...] = ("q", "k")
    adaptable_parameters = ("k_up", "v_up")
    weight_decay = ("k_up", "v_up")
    reads_source = False

    def __init__(self, width: int, spec: LatentAttention):
        super().__init__()
        self.spec, self.heads, self.mask = spec, spec.heads, spec.mask or Causal()
        self.dims = [spec.nope_dim, spec.rope_dim]
        self.q_latent_proj: nn.Module = nn.Identity()
        self.q_latent_norm: nn.Module = nn.Identity()
        if spec.query_rank:
            self.q_latent_proj = nn.Linear(width, spec.query_rank, bias=spec.bias)
            self.q_latent_norm = spec.norm.build(spec.query_rank)
        self.q_proj = nn.Linear(spec.query_rank or width, spec.heads * sum(self.dims), bias=False)
        self.latent_proj = nn.Linear(width, spec.rank, bias=spec.bias)
        self.latent_norm = spec.norm.build(spec.rank)
        self.k_rope_proj = nn.Linear(width, spec.rope_dim, bias=spec.bias)
        # Parameters, not linear layers: the absorbed form multiplies by the transpose.
        self.k_up = nn.Parameter(torch.empty(spec.heads, spec.nope_dim, spec.rank).normal_(std=spec.rank**-0.5))
        self.v_up = nn.Parameter(torch.empty(spec.heads, spec.value_dim, spec.rank).normal_(std=spec.rank**-0.5))
        self.o_proj = nn.Linear(spec.heads * spec.value_dim, width, bias=spec.bias)
        self.position = spec.position.build(spec.rope_dim, spec.heads)
        self.q, self.k, self.v, self.z = Tap(), Tap(), Tap(), Tap()
        self.scores, self.pattern = Tap(), Tap()
        self.scale = sum(self.dims) ** -0.5 if spec.scale is None else spec.scale
        self.attend = backend("auto")

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        q = split_heads(self.q_proj(self.q_latent_norm(self.q_latent_proj(x))), self.heads)  # (B, H, L, nope + rope)
        q, q_rope = q.split(self.dims, -1)
        latent = self.latent_norm(self.latent_proj(x)).unsqueeze(1)  # (B, 1, L, rank)
        q_rope, k_rope = self.position.rotate(q_rope, self.k_rope_proj(x).unsqueeze(1), layout)
        latent, k_rope, layout = state.extend(layout, latent=latent, k_rope=k_rope)  # (B, 1, S, rank), (B, 1, S, rope)
        hooked = any(tap.hooked for tap in (self.q, self.k, self.v))  # taps have the shapes of the expanded form
        absorbs = self.spec.absorbs(q.shape[2], latent.shape[2]) and not hooked
        form = self.attend_absorbed if absorbs else self.attend_expanded
        return self.o_proj(merge_heads(self.z(form(q, q_rope, latent, k_rope, layout))))

    def attend_expanded(self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layout: TokenLayout) -> Tensor:
        """(B, H, L, V), with keys and values per head."""
        k, v = (split_heads(F.linear(latent[:, 0], up.flatten(0, 1)), self.heads) for up in (self.k_up, self.v_up))
        k = torch.cat([k, k_rope.expand(-1, self.heads, -1, -1)], -1)  # (B, H, S, nope + rope)
        q = torch.cat([q, q_rope], -1)
        return attend_with_taps(self, self.q(q), self.k(k), self.v(v), layout, self.score_options(layout))

    def attend_absorbed(self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layout: TokenLayout) -> Tensor:
        """(B, H, L, V), with the latents as keys and values."""
        q = torch.cat([torch.einsum("bhln,hnr->bhlr", q, self.k_up), q_rope], -1)  # (B, H, L, rank + rope)
        k = torch.cat([latent, k_rope], -1)  # (B, 1, S, rank + rope)
        z = attend_with_taps(self, q, k, latent, layout, self.score_options(layout))  # (B, H, L, rank)
        return torch.einsum("bhlr,hvr->bhlv", z, self.v_up)

    def score_options(self, layout: TokenLayout) -> ScoreOptions:
        dropout = self.spec.dropout if self.training else 0.0
        return ScoreOptions(self.mask, self.scale, self.position.bias(layout), dropout=dropout)

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        return weights_of_heads(taps["q"], taps["k"], layout, self.score_options(layout), heads)
