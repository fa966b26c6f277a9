"""Multi-head attention with grouped keys and values, for training and decoding alike.

    head_h = softmax(q_h k_gᵀ / √E) v_g          out = W_o [head_1 … head_H]

H query heads share K key/value heads, H / K to each: K = H is multi-head (Vaswani et al. 2017), K = 1 multi-query
(Shazeer 2019), in between grouped-query attention (Ainslie et al. 2023).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from regard.at import At
from regard.kernels.attention import backend
from regard.kernels.attention.mask import Causal, Mask
from regard.parts.body import Body
from regard.parts.position.none import NoPosition, Position
from regard.parts.state import FRESH, PerToken, TokenState
from regard.parts.tap import Tap
from regard.spec import SpecError, require


@dataclass(frozen=True)
class Attention(Body):
    mixes: ClassVar[bool] = True

    heads: int
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width / heads
    position: Position = NoPosition()
    mask: Mask = Causal()
    bias: bool = False
    out_bias: bool | None = None  # None: as bias

    def check(self) -> None:
        require(self.heads > 0, f"attention: heads={self.heads} must be positive")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            divisors = [n for n in range(1, min(self.heads, 1024) + 1) if self.heads % n == 0]
            raise SpecError(
                f"attention: heads={self.heads} is not divisible by kv_heads={self.kv_heads}; "
                f"choose one of {', '.join(map(str, divisors))}"
            )
        require(self.head_dim is None or self.head_dim > 0, f"attention: head_dim={self.head_dim} must be positive")
        self.position.check_place("attention")

    def sizes(self, width: int) -> tuple[int, int, int]:
        """(heads, kv_heads, head_dim) in a stack this wide."""
        require(
            self.head_dim is not None or width % self.heads == 0,
            f"attention: width={width} is not divisible by heads={self.heads}; choose another or give head_dim",
        )
        return self.heads, self.kv_heads or self.heads, self.head_dim or width // self.heads

    @property
    def causal(self) -> bool:
        return self.mask.causal

    def build(self, width: int) -> nn.Module:
        return AttentionModule(width, self)

    def memory(self, width: int) -> PerToken:
        _, kv_heads, head_dim = self.sizes(width)
        return PerToken({"k": (kv_heads, head_dim), "v": (kv_heads, head_dim)})

    def flops(self, width: int, tokens: int, seen: int) -> int:
        heads, kv_heads, head_dim = self.sizes(width)
        return tokens * (4 * width * head_dim * (heads + kv_heads) + 4 * seen * heads * head_dim)


class AttentionModule(nn.Module):
    def __init__(self, width: int, spec: Attention):
        super().__init__()
        self.heads, self.kv_heads, head_dim = spec.sizes(width)
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(width, self.heads * head_dim, bias=spec.bias)
        self.k_proj = nn.Linear(width, self.kv_heads * head_dim, bias=spec.bias)
        self.v_proj = nn.Linear(width, self.kv_heads * head_dim, bias=spec.bias)
        self.o_proj = nn.Linear(
            self.heads * head_dim, width, bias=spec.bias if spec.out_bias is None else spec.out_bias
        )
        self.position = spec.position.build(head_dim, self.heads)
        self.q, self.k, self.v, self.z = Tap(), Tap(), Tap(), Tap()
        self.mask = spec.mask
        self.attend = backend("auto")

    def forward(self, x: Tensor, at: At, state: TokenState = FRESH) -> Tensor:
        q = split(self.q_proj(x), self.heads)  # (B, H, L, E)
        k = split(self.k_proj(x), self.kv_heads)  # (B, K, L, E)
        v = split(self.v_proj(x), self.kv_heads)  # (B, K, L, E)
        q, k = self.position.rotate(q, k, at)
        k, v, at = state.extend(at, k=k, v=v)  # (B, K, S, E)
        q, k, v = self.q(q), self.k(k), self.v(v)
        z = self.attend(q, k, v, at, self.mask, self.position.bias(at), self.scale)  # (B, H, L, E)
        return self.o_proj(merge(self.z(z)))


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, L, E)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)  # (B, L, H·E)


def use_backend(model: nn.Module, name: str) -> None:
    """Compute all attention of this model by that backend; a run-time choice that no checkpoint knows of."""
    for module in model.modules():
        if isinstance(module, AttentionModule):
            module.attend = backend(name)
