"""Linformer: keys and values are projected along the sequence, from n tokens to k linear combinations of them.

    out = softmax(Q (E K)ᵀ / √d) F V          E, F learned, k × n

The cost per query grows with k instead of n; attention is assumed to have low rank. The sequence has at most n tokens:
the columns of E and F belong to positions, and padding has none. Every combination includes later tokens, so the layer
cannot be causal: encoders only. Wang et al. 2020.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.kernels.attention import backend
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout, number_documents
from regard.parts.body import Body
from regard.parts.split_heads import head_dim_of, merge_heads, split_heads
from regard.parts.state import STATELESS, State
from regard.parts.tap import Tap, attend_with_taps
from regard.spec import require


@dataclass(frozen=True)
class Linformer(Body):
    mixes: ClassVar[bool] = True

    heads: int
    length: int  # n, of the longest sequence
    rank: int  # k, the number of combinations
    shared: bool = False  # F = E
    bias: bool = False

    def check(self) -> None:
        for name in ("heads", "length", "rank"):
            require(getattr(self, name) > 0, f"linformer: {name}={getattr(self, name)} must be positive")
        require(
            self.rank <= self.length,
            f"linformer: rank={self.rank} is larger than length={self.length}; choose at most {self.length}",
        )

    @property
    def causal(self) -> bool:
        return False

    @property
    def max_exact_cache(self) -> int:
        return self.length

    def check_width(self, width: int) -> None:
        head_dim_of(self.kind, width, self.heads)

    def build(self, width: int) -> nn.Module:
        return LinformerModule(width, self)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return tokens * (8 * width * width + 8 * self.rank * width)


class LinformerModule(nn.Module):
    no_attention_map = "its keys are learned combinations of tokens, not tokens; record its `pattern`"
    weight_decay = ("k_length", "v_length")

    def __init__(self, width: int, spec: Linformer):
        super().__init__()
        self.heads, self.length, self.scale = spec.heads, spec.length, head_dim_of(spec.kind, width, spec.heads) ** -0.5
        self.q_proj = nn.Linear(width, width, bias=spec.bias)
        self.k_proj = nn.Linear(width, width, bias=spec.bias)
        self.v_proj = nn.Linear(width, width, bias=spec.bias)
        self.o_proj = nn.Linear(width, width, bias=spec.bias)
        self.k_length = length_projection(spec)  # E
        self.v_length = None if spec.shared else length_projection(spec)  # F
        self.scores, self.pattern, self.z = Tap(), Tap(), Tap()  # scores of the combinations of tokens
        self.mask, self.attend = Full(), backend("auto")

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        q, k, v = (split_heads(p(x), self.heads) for p in (self.q_proj, self.k_proj, self.v_proj))  # (B, H, L, E)
        members = self.document_members(layout)  # (B, docs, L)
        k = self.combinations(self.k_length, layout, members) @ k  # (B, H, docs · k, E)
        v = self.combinations(self.k_length if self.v_length is None else self.v_length, layout, members) @ v
        keys = self.key_layout(layout, members.shape[1], k.shape[2])
        z = attend_with_taps(self, q, k, v, keys, ScoreOptions(self.mask, self.scale))
        return self.o_proj(merge_heads(self.z(z)))

    def document_members(self, layout: TokenLayout) -> Tensor:
        """(B, docs, L): the tokens of each document; padding is in none."""
        documents = layout.documents
        numbers = torch.zeros_like(layout.positions) if documents is None else number_documents(documents)
        count = 1 if documents is None else int(numbers.max()) + 1
        members = numbers.unsqueeze(1) == torch.arange(count, device=numbers.device).unsqueeze(-1)
        return members if layout.valid is None else members & layout.valid.unsqueeze(1)

    def combinations(self, projection: Tensor, layout: TokenLayout, members: Tensor) -> Tensor:
        """(B, 1, docs · k, L): the coefficient of every token in the combinations of its document."""
        can_check = layout.positions.device.type == "cpu" and not torch.compiler.is_compiling()
        if can_check and int(layout.positions.max()) >= self.length:
            raise ValueError(
                f"linformer: a sequence of {int(layout.positions.max()) + 1} tokens is longer than "
                f"length={self.length}; shorten it"
            )
        columns = projection.T[layout.positions]  # (B, L, k)
        return (members.unsqueeze(2) * columns.mT.unsqueeze(1)).flatten(1, 2).unsqueeze(1)

    def key_layout(self, layout: TokenLayout, documents: int, keys: int) -> TokenLayout:
        """The layout of the queries, with the combinations of their documents as keys."""
        positions = torch.zeros_like(layout.positions[:, :1]).expand(-1, keys)
        if (segments := layout.documents) is None:
            return layout.with_keys(positions)
        numbers = torch.arange(documents, device=positions.device).repeat_interleave(keys // documents)
        queries = replace(layout, segments=number_documents(segments))
        return queries.with_keys(positions, segments=numbers.expand_as(positions))


def length_projection(spec: Linformer) -> nn.Parameter:
    """(k, n)"""
    return nn.Parameter(torch.empty(spec.rank, spec.length).normal_(std=spec.length**-0.5))
