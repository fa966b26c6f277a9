"""Cross-attention: queries of one sequence, keys and values of another, the source (an encoder's output).

    head_h = softmax(q_h(x) k_g(source)ᵀ · scale) v_g(source)          Vaswani et al. 2017

Keys and values of the source are computed when it is given (`layout.with_source`) and cached for later steps. Queries
attend to the whole source, without a mask and without positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from regard.kernels.attention.mask import Full, Mask
from regard.layout import TokenLayout
from regard.parts.attention import Attention, AttentionModule
from regard.parts.position.base import NoPosition
from regard.parts.split_heads import merge_heads, split_heads
from regard.parts.state import STATELESS, PerSource, State
from regard.parts.tap import attend_with_taps
from regard.spec import require


@dataclass(frozen=True)
class CrossAttention(Attention):
    mask: Mask = Full()
    source_width: int | None = None  # None: as wide as this stack

    def check(self) -> None:
        super().check()
        require(
            self.mask == Full(),
            f"cross_attention: queries attend to the whole source; found mask={self.mask}, leave it out",
        )
        require(
            self.position == NoPosition(),
            f"cross_attention: position={self.position} is not supported, because the source is another sequence; "
            "leave it out",
        )

    @property
    def causal(self) -> bool:
        return True  # no token attends to another token of its own sequence

    @property
    def bias_heads(self) -> int | None:
        return None

    def build(self, width: int) -> nn.Module:
        return CrossAttentionModule(width, self, self.source_width)

    def memory(self, width: int) -> PerSource:
        return PerSource(self.arrays(width))


class CrossAttentionModule(AttentionModule):
    reads_source = True

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        q = self.clip(self.q_norm(split_heads(self.q_proj(x), self.heads)))  # (B, H, L, E)
        k, v, layout = state.read_source(layout, self.keys_and_values)  # (B, K, S, E)
        q, k, v = self.q(q), self.k(k), self.v(v)
        z = attend_with_taps(self, q, k, v, layout, self.score_options(layout))  # (B, H, L, E)
        return self.o_proj(merge_heads(self.gate(self.z(z), x)))

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        source = layout.inputs.source
        return super().attention_map(taps, layout if source is None else layout.cross(source.layout), heads)

    def keys_and_values(self, source: Tensor) -> dict[str, Tensor]:
        """Keys and values (B, K, S, E) of a source (B, S, D)."""
        k = self.clip(self.k_norm(split_heads(self.k_proj(source), self.kv_heads)))
        return {"k": k, "v": self.clip(split_heads(self.v_proj(source), self.kv_heads))}
