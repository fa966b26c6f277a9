"""Linformer: keys and values of a whole text are first projected along its length, from n tokens to k.

    out = softmax(Q (E K)ᵀ / √d) F V          E, F learned, k × n

So a query sees k mixtures instead of n tokens, and costs grow with n·k. It supposes that attention has low rank, and it
is for texts of one longest length n: a token's column of E and F is that of its position, padding has none. Every
mixture holds later tokens too, so it cannot be causal: encoders only. Wang et al. 2020.
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
from regard.parts.heads import head_dim_of, merge_heads, split_heads
from regard.parts.state import STATELESS, State
from regard.spec import require


@dataclass(frozen=True)
class Linformer(Body):
    mixes: ClassVar[bool] = True

    heads: int
    length: int  # of the longest text
    rank: int  # k: mixtures that stand for a text's tokens
    shared: bool = False  # is F = E?
    bias: bool = False

    def check(self) -> None:
        for name in ("heads", "length", "rank"):
            require(getattr(self, name) > 0, f"linformer: {name}={getattr(self, name)} must be positive")
        require(
            self.rank <= self.length,
            f"linformer: rank={self.rank} mixtures of length={self.length} tokens save nothing; choose fewer",
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
    no_attention_map = "its keys are learned mixtures of tokens, not tokens"

    def __init__(self, width: int, spec: Linformer):
        super().__init__()
        self.heads, self.length, self.scale = spec.heads, spec.length, head_dim_of(spec.kind, width, spec.heads) ** -0.5
        self.q_proj = nn.Linear(width, width, bias=spec.bias)
        self.k_proj = nn.Linear(width, width, bias=spec.bias)
        self.v_proj = nn.Linear(width, width, bias=spec.bias)
        self.o_proj = nn.Linear(width, width, bias=spec.bias)
        self.k_length = along_length(spec)  # E
        self.v_length = None if spec.shared else along_length(spec)  # F
        self.attend = backend("auto")

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        q, k, v = (split_heads(p(x), self.heads) for p in (self.q_proj, self.k_proj, self.v_proj))  # (B, H, L, E)
        where = self.documents(layout)  # (B, docs, L)
        k = self.mixtures(self.k_length, layout, where) @ k  # (B, H, docs · k, E)
        v = self.mixtures(self.k_length if self.v_length is None else self.v_length, layout, where) @ v
        z = self.attend(
            q, k, v, self.before_mixtures(layout, where.shape[1], k.shape[2]), ScoreOptions(Full(), self.scale)
        )
        return self.o_proj(merge_heads(z))

    def documents(self, layout: TokenLayout) -> Tensor:
        """(B, docs, L): which tokens are in each document; padding is in none."""
        documents = layout.documents
        own = torch.zeros_like(layout.positions) if documents is None else number_documents(documents)
        count = 1 if documents is None else int(own.max()) + 1
        where = own.unsqueeze(1) == torch.arange(count, device=own.device).unsqueeze(-1)
        return where if layout.valid is None else where & layout.valid.unsqueeze(1)

    def mixtures(self, along: Tensor, layout: TokenLayout, where: Tensor) -> Tensor:
        """(B, 1, docs · k, L): every token's share in the mixtures of its document."""
        if layout.positions.device.type == "cpu" and int(layout.positions.max()) >= self.length:
            raise ValueError(
                f"a text of {int(layout.positions.max()) + 1} tokens is longer than the {self.length} that linformer "
                "projects; shorten it"
            )
        columns = along.T[layout.positions]  # (B, L, k)
        return (where.unsqueeze(2) * columns.mT.unsqueeze(1)).flatten(1, 2).unsqueeze(1)

    def before_mixtures(self, layout: TokenLayout, documents: int, keys: int) -> TokenLayout:
        """The same queries before the mixtures of their documents."""
        places = torch.zeros_like(layout.positions[:, :1]).expand(-1, keys)
        if (segments := layout.documents) is None:
            return layout.with_keys(places)
        own = torch.arange(documents, device=places.device).repeat_interleave(keys // documents).expand_as(places)
        return replace(layout, segments=number_documents(segments)).with_keys(places, segments=own)


def along_length(spec: Linformer) -> nn.Parameter:
    """(k, n)"""
    return nn.Parameter(torch.empty(spec.rank, spec.length).normal_(std=spec.length**-0.5))
