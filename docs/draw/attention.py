"""Figures about attention: masks, entropy and caches."""

from typing import Any

import torch
from torch import Tensor

from plotting import BLUE, GREEN, LIGHT_GREY, ORANGE, PURPLE, RED, canvas, cells, label
from regard.engine.stores.paged import Paged
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal, Full, Mask, PrefixLM, attention_mask
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.sparse_transformer import FixedPattern, StridedPattern
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.kernels.attention.statistics import attend_with_statistics
from regard.layout import TokenLayout
from regard.parts.attention import Attention
from regard.parts.latent_attention import LatentAttention
from regard.verification.trial import layout_with_padding


def masks() -> Any:
    """The keys (columns) that each query (row) attends to."""
    whole, size = TokenLayout.whole(1, 16), 16
    lengths = (5, 8, 3)
    documents = TokenLayout(
        torch.cat([torch.arange(n) for n in lengths])[None],
        torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None],
    )
    left = layout_with_padding([11], size, left=True)
    source = whole.cross(TokenLayout.whole(1, 10))
    panels = {
        "full": allowed(Full(), whole),
        "causal": allowed(Causal(), whole),
        "prefix of 6": allowed(PrefixLM(6), whole),
        "three documents": allowed(Causal(), documents),
        "padded on the left": allowed(Causal(), left) * left.valid[0].unsqueeze(-1),
        "10 source tokens": allowed(Full(), source),
    }
    figure, axes = canvas(1, 6, height=1.42)
    for panel, (title, weights) in zip(axes, panels.items(), strict=True):
        cells(panel, weights, title)
    return figure


def patterns() -> Any:
    whole = TokenLayout.whole(1, 32)
    layout = tuple(tuple(sorted({0, max(row - 1, 0), row})) for row in range(8))
    panels = {
        "Window(8)": Window(8),
        "Window(4, causal=False)": Window(4, causal=False),
        "Dilated(6, 3)": Dilated(6, 3),
        "SinksAndWindow(2, 8)": SinksAndWindow(2, 8),
        "StridedPattern(6)": StridedPattern(6),
        "FixedPattern(6)": FixedPattern(6),
        "BlockSparse(4, …)": BlockSparse(4, layout),
        "Longformer(4, 2)": Longformer(4, 2),
        "BigBird(2, …)": BigBird(2, window=3, globals=1, random=2, length=32),
        "BigBird, causal": BigBird(2, window=3, globals=1, random=2, length=32, causal=True),
    }
    figure, axes = canvas(2, 5, height=3.3)
    for panel, (title, mask) in zip(axes, panels.items(), strict=True):
        cells(panel, allowed(mask, whole), title)
    return figure


def allowed(mask: Mask, layout: TokenLayout) -> Tensor:
    """(L, S) 1 where the query attends to the key."""
    pairs = attention_mask(mask, layout)
    shape = layout.positions.shape[1], layout.key_positions.shape[1]
    return torch.ones(shape) if pairs is None else pairs[0, 0].double()


def scales() -> Any:
    """Mean entropy of attention over 256 keys by head dim, for three divisors of the score."""
    figure, (axes,) = canvas(height=2.6)
    generator, widths = torch.Generator().manual_seed(0), [4, 8, 16, 32, 64, 128, 256]
    layout, entropies = TokenLayout.whole(1, 256), {power: [] for power in (0, 0.5, 1)}
    for width in widths:
        q, k = torch.randn(2, 1, 2, 256, width, generator=generator)
        for power, means in entropies.items():
            _, statistics = attend_with_statistics(q, k, k, layout, ScoreOptions(Full(), width**-power))
            means.append(statistics.entropy.mean().item())
    names = {0: ("q·k", RED), 0.5: ("q·k / √E", BLUE), 1: ("q·k / E", ORANGE)}
    for power, means in entropies.items():
        name, colour = names[power]
        axes.plot(widths, means, color=colour, linewidth=2, marker="o", markersize=3)
        label(axes, widths[-1], means[-1], name, colour)
    highest = torch.tensor(256.0).log().item()
    axes.plot([4, 256], [highest, highest], color=LIGHT_GREY, linewidth=1)
    label(axes, 4, highest + 0.3, "log 256: uniform weights", fontsize=8)
    axes.set(xlabel="head dim, E", ylabel="entropy (nats)", xscale="log", ylim=(0, 6.3), xlim=(3.6, 420))
    axes.set_xticks(widths, labels=[str(width) for width in widths])
    axes.minorticks_off()
    return figure


def caches() -> Any:
    """Numbers that one layer caches per token."""
    mixers = {
        "multi-head, 32 kv heads": Attention(32),
        "grouped-query, 8 kv heads": Attention(32, 8),
        "latent, rank 512": LatentAttention(32, rank=512, nope_dim=128, rope_dim=64),
        "multi-query, 1 kv head": Attention(32, 1),
    }
    figure, (axes,) = canvas(height=1.7)
    for index, mixer in enumerate(mixers.values()):
        size = sum(heads * dim for heads, dim in mixer.memory(4096).arrays.values())
        axes.barh(index, size, color=BLUE, height=0.62)
        label(axes, size, index, f"{size:,}")
    axes.set_yticks(range(len(mixers)), labels=list(mixers))
    axes.set(xlim=(0, 9200), xticks=[])
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def pages() -> Any:
    """Four rows of a paged store that have grown alternately, and the blocks of the pool that each row owns."""
    store = Paged((), rows=4, capacity=96, blocks=20, dtype=torch.float32, block=16)
    for row, length in ((0, 20), (1, 40), (2, 16), (0, 50), (3, 30), (1, 90), (2, 40)):
        assert store.reserve(row, length)
    figure, (axes,) = canvas(height=1.5)
    for row, (owned, colour) in enumerate(zip(store.owned, (BLUE, ORANGE, GREEN, PURPLE), strict=True)):
        for order, block in enumerate(owned):
            axes.barh(0, 0.92, left=block - 0.46, height=0.8, color=colour)
            axes.text(block, 0, f"{'abcd'[row]}{order}", ha="center", va="center", color="white", fontsize=9)
    for block in store.pool.free:
        axes.barh(0, 0.92, left=block - 0.46, height=0.8, color=LIGHT_GREY)
    axes.set(
        xlim=(0.4, 20.6), ylim=(-0.6, 0.6), yticks=[], xlabel="blocks of the pool; a0, a1 … belong to row a, in order"
    )
    axes.set_xticks([1, 5, 10, 15, 20])
    axes.spines[:].set_visible(False)
    return figure
