"""Native sparse attention: three attentions to parts of the previous tokens, combined by gates.

    out = W_o Σ_c σ(W_g x)_c ⊙ attention_c(q, k_c, v_c)        c: compressed, selected, window        Yuan et al. 2025

    compressed   blocks of `length` tokens, one every `stride`: k̃ = W₂ gelu(W₁ [k_1 + p_1; …; k_length + p_length])
    selected     all tokens of the blocks with the highest compressed attention (kernels/native_sparse.py)
    window       the last tokens

Each branch has its own keys and values, so that the window, which learns fastest, does not determine those of the other
branches. Compressed keys are not rotated: p encodes the position within a block, and a bias uses the position of the
block's last token. The compressed keys and values are cached with that token, so a decoding step reads S/stride of them
and select·block + window tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.attention import backend
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.reference import attention_weights, per_head
from regard.kernels.native_sparse import (
    SortedKeys,
    attend_to_blocks,
    choose_blocks,
    completed_blocks,
    gather_keys,
    importance,
    sort_keys,
)
from regard.layout import Bias, TokenLayout
from regard.parts.attention import Attention
from regard.parts.body import Body
from regard.parts.position.base import NoPosition, Position
from regard.parts.split_heads import merge_heads, split_heads
from regard.parts.state import STATELESS, PerToken, State
from regard.parts.tap import Tap, attend_with_taps
from regard.spec import require


@dataclass(frozen=True)
class NativeSparse(Body):
    mixes: ClassVar[bool] = True

    heads: int
    kv_heads: int | None = None  # per branch; None: as many as heads
    head_dim: int | None = None  # None: width / heads
    length: int = 32  # tokens of a compressed block
    stride: int = 16  # from one compressed block to the next
    block: int = 64  # tokens of a selected block
    select: int = 16  # number of selected blocks, including the first and the last two
    window: int = 512
    position: Position = NoPosition()

    def check(self) -> None:
        require(self.stride > 0, f"native_sparse: stride={self.stride} must be positive")
        for name in ("length", "block"):
            size = getattr(self, name)
            require(
                size > 0 and size % self.stride == 0,
                f"native_sparse: {name}={size} must be a positive multiple of stride={self.stride}",
            )
        require(self.select > 2, f"native_sparse: select={self.select} must be at least 3: the first and the last two")
        require(self.window > 0, f"native_sparse: window={self.window} must be positive")
        self.attention.check()

    @property
    def attention(self) -> Attention:
        """An attention of the size of one branch."""
        return Attention(self.heads, self.kv_heads, self.head_dim, self.position)

    @property
    def bias_heads(self) -> int | None:
        return self.heads

    def build(self, width: int) -> nn.Module:
        return NativeSparseModule(width, self)

    def memory(self, width: int) -> PerToken:
        _, kv_heads, head_dim = self.attention.sizes(width)
        branches, summaries = (3 * kv_heads, head_dim), (kv_heads, head_dim)
        return PerToken({"k": branches, "v": branches, "k_block": summaries, "v_block": summaries})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        """The window is counted as computed by a backend that skips all other keys."""
        heads, kv_heads, head_dim = self.attention.sizes(width)
        compressed, blocks = -(-keys // self.stride), -(-keys // self.block)
        projections = width * (2 * heads * head_dim + 6 * kv_heads * head_dim + 3 * heads)
        summaries = -(-tokens // self.stride) * 2 * kv_heads * head_dim * head_dim * (self.length + 1)
        attended = compressed + min(self.select, blocks) * self.block + min(self.window, keys)
        pairs = 2 * heads * head_dim * attended + kv_heads * compressed * blocks
        return 2 * (tokens * (projections + pairs) + summaries)


class NativeSparseModule(nn.Module):
    no_attention_map = (
        "its output is a gated sum of three attentions, and compressed values are no linear function of the tokens; "
        "record the patterns of its branches: compressed.pattern, selected.pattern, window.pattern, and gates"
    )

    def __init__(self, width: int, spec: NativeSparse):
        super().__init__()
        self.spec = spec
        self.heads, self.kv_heads, head_dim = spec.attention.sizes(width)
        self.q_proj = nn.Linear(width, self.heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, 3 * self.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, 3 * self.kv_heads * head_dim, bias=False)
        self.branch_proj = nn.Linear(width, 3 * self.heads, bias=False)
        self.o_proj = nn.Linear(self.heads * head_dim, width, bias=False)
        self.k_summary = Summary(spec.length, head_dim)
        self.v_summary = Summary(spec.length, head_dim)
        self.position = spec.position.build(head_dim, self.heads)
        self.causal_mask, self.window_mask = Causal(), Window(spec.window)
        self.compressed, self.selected, self.window = Branch(), Branch(), WindowBranch()
        self.gates, self.z = Tap(), Tap()
        self.scale = head_dim**-0.5

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads)  # (B, H, L, E)
        k, v = (split_heads(proj(x), 3 * self.kv_heads) for proj in (self.k_proj, self.v_proj))  # (B, 3K, L, E)
        k_compressed, k_rotated = k.split([self.kv_heads, 2 * self.kv_heads], 1)
        q_rotated, k_rotated = self.position.rotate(q, k_rotated, layout)
        k, v, key_layout = state.extend(layout, k=torch.cat([k_compressed, k_rotated], 1), v=v)  # (B, 3K, S, E)
        keys, bias = key_layout.derived(sort_keys), self.position.bias(key_layout)
        k_compressed, k_selected, k_window = k.chunk(3, 1)  # (B, K, S, E) each
        v_compressed, v_selected, v_window = v.chunk(3, 1)  # (B, K, S, E) each
        blocks = self.summarize(k_compressed, v_compressed, layout.valid, keys)
        k_block, v_block, _ = state.extend(layout, k_block=blocks[0], v_block=blocks[1])  # (B, K, S, E)

        compressed, chosen = self.attend_compressed(q, k_block, v_block, key_layout, keys, bias)
        pattern = self.selected.pattern if self.selected.pattern.hooked else None
        selected = attend_to_blocks(
            q_rotated, k_selected, v_selected, key_layout, keys, chosen, self.spec.block, self.scale, bias, pattern
        )
        options = ScoreOptions(self.window_mask, self.scale, bias)
        window = attend_with_taps(self.window, q_rotated, k_window, v_window, key_layout, options)
        gates = self.gates(split_heads(self.branch_proj(x).sigmoid(), 3 * self.heads))  # (B, 3H, L, 1)
        z = sum(gate * branch for gate, branch in zip(gates.chunk(3, 1), (compressed, selected, window), strict=True))
        return self.o_proj(merge_heads(self.z(z)))

    def summarize(self, k: Tensor, v: Tensor, valid: Tensor | None, keys: SortedKeys) -> list[Tensor]:
        """(B, K, L, E) compressed keys and values of the blocks that a new token completes; zeros at other tokens."""
        tokens, complete = completed_blocks(keys.query_indices, valid, self.spec.length, self.spec.stride)  # (B, N)
        last = (keys.starts + keys.query_indices).gather(1, tokens).unsqueeze(-1)
        ranks = (last + torch.arange(1 - self.spec.length, 1, device=last.device)).clamp_min(0)  # (B, N, length)
        slots = keys.slots.gather(1, ranks.flatten(1))
        out = []
        for x, summary in ((k, self.k_summary), (v, self.v_summary)):
            blocks = summary(gather_keys(x, slots.unsqueeze(1)).unflatten(2, ranks.shape[1:]))  # (B, K, N, E)
            blocks = blocks * complete[:, None, :, None]
            index = tokens[:, None, :, None].expand_as(blocks)
            zeros = blocks.new_zeros(*blocks.shape[:2], keys.query_indices.shape[1], blocks.shape[3])
            out.append(zeros.scatter(2, index, blocks))
        return out

    def attend_compressed(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, keys: SortedKeys, bias: Bias | None
    ) -> tuple[Tensor, Tensor]:
        """The compressed attention (B, H, L, E), and the blocks with the highest attention (B, K, L, select)."""
        spec = self.spec
        slots, starts, block_layout = layout.derived(compressed_blocks, spec.length, spec.stride)
        k, v = (gather_keys(x, slots.unsqueeze(1)) for x in (k, v))  # (B, K, N, E)
        options = ScoreOptions(self.causal_mask, self.scale, bias)
        weights = self.compressed.pattern(attention_weights(q, k, block_layout, options))  # (B, H, L, N)
        with torch.no_grad():
            group = weights.unflatten(1, (self.kv_heads, -1)).sum(2)  # (B, K, L, N)
            blocks = -(-keys.slots.shape[1] // spec.block)
            scores = importance(group, starts, spec.length, spec.stride, spec.block, blocks)
            chosen = choose_blocks(scores, keys.query_indices, spec.block, spec.select)
        return weights.to(q.dtype) @ per_head(v, q), chosen


class Branch(nn.Module):
    """The tap of a branch's weights: (B, H, L, blocks) compressed, (B, H, L, S) selected and in the window."""

    def __init__(self) -> None:
        super().__init__()
        self.pattern = Tap()


class WindowBranch(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.scores = Tap()
        self.attend = backend("auto")


def compressed_blocks(layout: TokenLayout, length: int, stride: int) -> tuple[Tensor, Tensor, TokenLayout]:
    """Slots (B, N) of tokens that complete a block, first indices (B, N) of the blocks, layout with blocks as keys."""
    keys = layout.derived(sort_keys)
    valid = None if layout.key_valid is None else layout.key_valid.gather(1, keys.slots)
    tokens, complete = completed_blocks(keys.indices, valid, length, stride)
    slots = keys.slots.gather(1, tokens)
    segments = None if layout.key_segments is None else layout.key_segments.gather(1, slots)
    blocks = layout.with_keys(layout.key_positions.gather(1, slots), complete, segments)
    return slots, keys.indices.gather(1, tokens) + 1 - length, blocks


class Summary(nn.Module):
    """The tokens of a block (…, length, E) compressed to one (…, E)."""

    def __init__(self, length: int, head_dim: int):
        super().__init__()
        self.places = nn.Parameter(torch.empty(length, head_dim).normal_(std=head_dim**-0.5))  # p
        self.inner = nn.Linear(length * head_dim, head_dim, bias=False)
        self.outer = nn.Linear(head_dim, head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner((x + self.places).flatten(-2))))
