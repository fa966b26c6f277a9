"""Multi-head attention with grouped keys and values, for training and decoding alike.

    head_h = softmax(q_h k_gᵀ · scale) v_g          out = W_o [head_1 … head_H]

H query heads share K key/value heads, H / K to each: K = H is multi-head (Vaswani et al. 2017), K = 1 multi-query
(Shazeer 2019), in between grouped-query attention (Ainslie et al. 2023). Options: a norm of queries and keys
(Henry et al. 2020; over each head, or over all at once as in OLMo 2), a bound on queries, keys and values (MPT, OLMoE),
a cap on the scores, one learned sink per head (kernels/attention/arguments.py), and a gate on the heads' outputs,
z ⊙ σ(W_g x) (Qiu et al. 2025). `sinks` adds a learned score per head to the softmax, without a token (GPT-OSS); the
mask SinksAndWindow instead keeps the first tokens of the sequence as keys (StreamingLLM). They can be combined.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from regard.kernels.attention import backend
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal, Mask
from regard.kernels.attention.reference import weights_of_heads
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.norm import Norm
from regard.parts.position.base import NoPosition, Position
from regard.parts.split_heads import divisors, head_dim_of, merge_heads, split_heads
from regard.parts.state import STATELESS, Memory, PerToken, State
from regard.parts.tap import Tap, attend_with_taps
from regard.spec import SpecError, require


@dataclass(frozen=True)
class Attention(Body):
    """With mask=None the model sets the mask: a Decoder Causal(), an Encoder Full().

    It does so when its spec is created. Built outside of a model, an attention without a mask is causal.
    """

    mixes: ClassVar[bool] = True
    pages: ClassVar[bool] = True  # a paged store may return keys and values in pages, which `attend` reads

    heads: int
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width / heads
    position: Position = NoPosition()
    mask: Mask | None = None  # None: the model's default
    bias: bool = False
    out_bias: bool | None = None  # None: the value of bias
    key_bias: bool | None = None  # None: the value of bias; False in Whisper
    qk_norm: Norm | None = None
    norm_over: Literal["head", "all"] = "head"
    clip: float | None = None  # queries, keys and values are clamped to ±clip, after the norm
    scale: float | None = None  # of the scores; None: 1 / √head_dim
    softcap: float | None = None
    sinks: bool = False  # one learned score per head that takes weight and has no value
    gate: Literal["none", "head", "element"] = "none"  # one gate per head or per coordinate
    dropout: float = 0.0  # on the weights, in training

    def check(self) -> None:
        require(self.heads > 0, f"attention: heads={self.heads} must be positive")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise SpecError(
                f"attention: heads={self.heads} is not divisible by kv_heads={self.kv_heads}; "
                f"choose one of {', '.join(map(str, divisors(self.heads)))}"
            )
        require(self.head_dim is None or self.head_dim > 0, f"attention: head_dim={self.head_dim} must be positive")
        for name in ("clip", "softcap"):
            limit = getattr(self, name)
            require(limit is None or limit > 0, f"attention: {name}={limit} must be positive")
        require(0 <= self.dropout < 1, f"attention: dropout={self.dropout} must be in [0, 1)")
        self.position.check_place("attention")

    def sizes(self, width: int) -> tuple[int, int, int]:
        """(heads, kv_heads, head_dim) in a stack of this width."""
        head_dim = self.head_dim or head_dim_of("attention", width, self.heads, ", or set head_dim")
        return self.heads, self.kv_heads or self.heads, head_dim

    def attention_sizes(self, width: int) -> tuple[int, int, int]:
        return self.sizes(width)

    def canonical(self, width: int) -> Self:
        if not width:
            return self
        _, kv_heads, head_dim = self.sizes(width)
        return replace(
            self,
            kv_heads=kv_heads,
            head_dim=head_dim,
            out_bias=self.bias if self.out_bias is None else self.out_bias,
            key_bias=self.bias if self.key_bias is None else self.key_bias,
            scale=head_dim**-0.5 if self.scale is None else self.scale,
        )

    @property
    def causal(self) -> bool:
        return self.mask is None or self.mask.causal

    @property
    def bias_heads(self) -> int | None:
        return self.heads

    def build(self, width: int) -> nn.Module:
        return AttentionModule(width, self)

    def memory(self, width: int) -> Memory:
        mask = self.mask or Causal()
        selectable = self.pages and type(mask) is Causal and not self.position.replaces_bias
        return PerToken(
            self.arrays(width), mask.sliding_window, mask.first_tokens, pages=self.pages,
            rotated=(("k", self.position),), selectable=selectable, relative=mask.relative,
        )  # fmt: skip

    def arrays(self, width: int) -> dict[str, tuple[int, int]]:
        _, kv_heads, head_dim = self.sizes(width)
        return {"k": (kv_heads, head_dim), "v": (kv_heads, head_dim)}

    def flops(self, width: int, tokens: int, keys: int) -> int:
        heads, kv_heads, head_dim = self.sizes(width)
        gates = {"none": 0, "head": heads, "element": heads * head_dim}[self.gate]
        return tokens * (4 * width * head_dim * (heads + kv_heads) + 2 * width * gates + 4 * keys * heads * head_dim)


class AttentionModule(nn.Module):
    attention_taps: tuple[str, ...] = ("q", "k")
    reads_source = False

    def __init__(self, width: int, spec: Attention, source_width: int | None = None, out_width: int | None = None):
        super().__init__()
        source_width, out_width = source_width or width, out_width or width
        self.heads, self.kv_heads, head_dim = spec.sizes(width)
        self.q_proj = nn.Linear(width, self.heads * head_dim, bias=spec.bias)
        self.k_proj = nn.Linear(
            source_width, self.kv_heads * head_dim, bias=spec.bias if spec.key_bias is None else spec.key_bias
        )
        self.v_proj = nn.Linear(source_width, self.kv_heads * head_dim, bias=spec.bias)
        self.o_proj = nn.Linear(
            self.heads * head_dim, out_width, bias=spec.bias if spec.out_bias is None else spec.out_bias
        )
        over_all = spec.norm_over == "all"
        self.q_norm = HeadNorm(spec.qk_norm, head_dim, self.heads if over_all else 1)
        self.k_norm = HeadNorm(spec.qk_norm, head_dim, self.kv_heads if over_all else 1)
        self.clip = nn.Identity() if spec.clip is None else nn.Hardtanh(-spec.clip, spec.clip)
        self.position = spec.position.build(head_dim, self.heads)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if spec.sinks else None
        self.gate = GATES[spec.gate](width, self.heads, head_dim)
        self.q, self.k, self.v, self.z = Tap(), Tap(), Tap(), Tap()
        self.scores, self.pattern = Tap(), Tap()
        self.mask, self.softcap, self.dropout = spec.mask or Causal(), spec.softcap, spec.dropout
        self.scale = head_dim**-0.5 if spec.scale is None else spec.scale
        self.attend = backend("auto")

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        q = self.clip(self.q_norm(split_heads(self.q_proj(x), self.heads)))  # (B, H, L, E)
        k = self.clip(self.k_norm(split_heads(self.k_proj(x), self.kv_heads)))  # (B, K, L, E)
        v = self.clip(split_heads(self.v_proj(x), self.kv_heads))  # (B, K, L, E)
        q, k = self.position.rotate(q, k, layout)
        k, v, layout = state.extend(layout, k=k, v=v)  # (B, K, S, E)
        q, k, v = self.q(q), self.k(k), self.v(v)
        z = attend_with_taps(self, q, k, v, layout, self.score_options(layout))  # (B, H, L, E)
        return self.o_proj(merge_heads(self.gate(self.z(z), x)))

    def score_options(self, layout: TokenLayout) -> ScoreOptions:
        dropout = self.dropout if self.training else 0.0
        return ScoreOptions(self.mask, self.scale, self.position.bias(layout), self.softcap, self.sinks, dropout)

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        return weights_of_heads(taps["q"], taps["k"], layout, self.score_options(layout), heads)


class HeadNorm(nn.Module):
    """A norm over each head's vector (one weight for all heads), or over the vectors of this many heads at once."""

    def __init__(self, norm: Norm | None, head_dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.Identity() if norm is None else norm.build(heads * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.heads == 1 else split_heads(self.norm(merge_heads(x)), self.heads)


class NoGate(nn.Module):
    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z


class Gate(nn.Module):
    """z ⊙ σ(W x), one factor per coordinate."""

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        self.proj = nn.Linear(width, heads * head_dim, bias=False)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z * split_heads(self.proj(x), self.heads).sigmoid()


class HeadGate(Gate):
    """z ⊙ σ(W x), one factor per head."""

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__(width, heads, 1)


GATES = {"none": NoGate, "head": HeadGate, "element": Gate}


def use_backend(model: nn.Module, name: str) -> None:
    """Compute all attention of the model with this backend. It is not part of a checkpoint."""
    for module in model.modules():
        if "attend" in vars(module):
            vars(module)["attend"] = backend(name)
