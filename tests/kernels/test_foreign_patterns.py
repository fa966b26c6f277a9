"""The patterns of Longformer and BigBird equal their attention in transformers, with copied weights."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BigBirdConfig, LongformerConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from regard.kernels.attention import backend
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Mask
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.layout import TokenLayout

HEADS, WIDTH = 2, 16


def attend_with_projections_of(theirs: nn.Module, x: Tensor, mask: Mask, name: str) -> Tensor:
    q, k, v = (
        getattr(theirs, part)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in ("query", "key", "value")
    )
    options = ScoreOptions(mask, (WIDTH // HEADS) ** -0.5)
    return backend(name)(q, k, v, TokenLayout.whole(*x.shape[:2]), options).transpose(1, 2).flatten(2)


@pytest.mark.ledger("sp.longformer")
@pytest.mark.parametrize("name", ["reference", "block_sparse", "sdpa"])
@pytest.mark.parametrize("window", [4, 8])
def test_longformer_equals_transformers(window: int, name: str) -> None:
    """Their attention_window counts both sides. Global tokens have the same projections as the other tokens."""
    config = LongformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[2 * window], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, 0).double().eval()
    for part in ("query", "key", "value"):
        getattr(theirs, f"{part}_global").load_state_dict(getattr(theirs, part).state_dict())
    x = torch.randn(2, 8 * window, WIDTH, dtype=torch.float64)
    attention_mask = torch.zeros(2, 8 * window, dtype=torch.float64)
    attention_mask[:, :3] = 10000.0  # in transformers a positive value means global
    expected = theirs(
        x,
        attention_mask=attention_mask,
        is_index_masked=attention_mask < 0,
        is_index_global_attn=attention_mask > 0,
        is_global_attn=True,
    )[0]
    found = attend_with_projections_of(theirs, x, Longformer(window, 3), name)
    assert (found - expected).abs().max() < 1e-6  # the softmax of transformers is in float32


@pytest.mark.ledger("sp.bigbird", "sp.block")
@pytest.mark.parametrize("name", ["reference", "block_sparse", "sdpa"])
def test_bigbird_equals_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers the first and the last block are global, so the pattern depends on the length."""
    block, blocks = 4, 12
    config = BigBirdConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, block_size=block, num_random_blocks=2, max_position_embeddings=48
    )
    theirs = BigBirdBlockSparseAttention(config, seed=3).double().eval()
    inner = range(1, blocks - 1)
    drawn = {row: random.sample([c for c in inner if abs(c - row) > 1], 2) for row in inner}
    table = np.array([drawn[row] for row in inner])
    monkeypatch.setattr(theirs, "_bigbird_block_rand_mask_with_head", lambda **arguments: [table] * HEADS)
    layout = {row: {0, blocks - 1, row - 1, row, row + 1, *drawn[row]} for row in inner}
    layout |= {0: set(range(blocks)), blocks - 1: set(range(blocks))}
    mask = BlockSparse(block, tuple(tuple(sorted(layout[row])) for row in range(blocks)), causal=False)
    x = torch.randn(2, block * blocks, WIDTH, dtype=torch.float64)
    ones = torch.ones(2, 1, block * blocks, 1, dtype=torch.float64)
    expected = theirs(
        x,
        band_mask=torch.ones(2, 1, blocks - 4, block, 3 * block, dtype=torch.float64),
        from_mask=ones,
        to_mask=ones.transpose(2, 3),
        from_blocked_mask=ones.view(2, blocks, block),
        to_blocked_mask=ones.view(2, blocks, block),
    )[0]
    assert (attend_with_projections_of(theirs, x, mask, name) - expected).abs().max() < 1e-10
