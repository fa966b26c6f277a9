"""Linear attention sums its quadratic form in another order: the same result at linear cost."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard.kernels.recurrent.linear_attention import linear_attention
from regard.parts.linear_attention import LinearAttention


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """φ(q), φ(k), values, and an empty state."""
    q, k, v = (random(1, 2, length, 4, seed=seed) for seed in range(3))
    elu = torch.nn.functional.elu
    return elu(q) + 1, elu(k) + 1, v, torch.zeros(1, 2, 4, 5, dtype=torch.float64)


@pytest.mark.ledger("lin.assoc")
def test_matrix_products_are_associative() -> None:
    generator = np.random.RandomState(0)
    q, k, v = (torch.from_numpy(generator.randn(4, 2)) for _ in range(3))
    scores, summary = q @ k.T, k.T @ v
    assert (scores.numel(), summary.numel()) == (16, 4)
    assert (scores @ v - q @ summary).abs().max() < 1e-14


@pytest.mark.ledger("lin.attn", "lin.normalised")
def test_linear_attention_equals_the_quadratic_form_of_its_kernel() -> None:
    q, k, v, empty = features(150)
    similarity = (q @ k.mT).tril()  # (B, H, L, L)
    assert similarity.min() >= 0
    weights = similarity / similarity.sum(-1, keepdim=True)
    assert (weights.sum(-1) - 1).abs().max() < 1e-14
    out, _ = linear_attention(q, k, v, empty)
    assert (out - weights @ v).abs().max() < 1e-12
    assert (out - similarity @ v).abs().max() > 1  # without normalization the result differs


@pytest.mark.ledger("lin.attn", "lin.recurrent")
def test_every_decoding_step_costs_the_same() -> None:
    q, k, v, state = features(150)
    whole, last = linear_attention(q, k, v, state)
    flops = set()
    for t in range(150):
        token = slice(t, t + 1)
        with FlopCounterMode(display=False) as counter:
            out, state = linear_attention(q[:, :, token], k[:, :, token], v[:, :, token], state)
        assert (out - whole[:, :, token]).abs().max() < 1e-12
        assert state.numel() == 2 * (4 * 4 + 4)  # two heads with r·d_v + r elements each
        flops.add(counter.get_total_flops())
    assert len(flops) == 1
    assert (state - last).abs().max() < 1e-10
    assert LinearAttention(2).flops(8, 1280, 1280) == 2 * LinearAttention(2).flops(8, 640, 640)
    assert LinearAttention(2).memory(8).arrays == {"sums": (2, 4, 5)}
