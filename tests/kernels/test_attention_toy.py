"""Small worked examples of attention: three keys, three orthonormal tokens, and five random tokens computed in R."""

import math

import pytest
import torch
from torch import Tensor

from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.reference import attend, attention_weights
from regard.layout import TokenLayout
from regard.lens.maps import row_entropy
from regard.parts.position.sinusoidal import Sinusoidal
from tests.kernels.r_generator import RGenerator

TOKENS = 5


def one_head(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Returns (weights, output) of one head; all tensors are matrices, and the scores are scaled by 1/√d_k."""
    layout, options = TokenLayout(torch.arange(len(q)).unsqueeze(0)), ScoreOptions(mask, q.shape[-1] ** -0.5)
    layout = layout.with_keys(torch.arange(len(k)).unsqueeze(0))
    q, k, v = (x.double()[None, None] for x in (q, k, v))
    return attention_weights(q, k, layout, options)[0, 0], attend(q, k, v, layout, options)[0, 0]


def rounds_to(found: Tensor, expected: list[list[float]]) -> bool:
    """Whether the numbers round to the expected ones, which have three decimals."""
    return bool((found - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 0.0005)


@pytest.fixture
def toy() -> tuple[RGenerator, Tensor]:
    """Five tokens of width 4: normal embeddings plus sinusoids; the generator continues with the projections."""
    r = RGenerator(2017)
    x = r.matrix(TOKENS, 4)
    return r, Sinusoidal().build(4, 1).embed(x.unsqueeze(0), TokenLayout.whole(1, TOKENS))[0]


def self_attention(toy: tuple[RGenerator, Tensor], mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (scaled scores, weights, output) with projections drawn from N(0, 1)."""
    r, x = toy
    q, k, v = (x @ r.matrix(4, 4) for _ in range(3))
    return q @ k.T / 2, *one_head(q, k, v, mask)


@pytest.mark.ledger("attn.3key")
def test_one_query_with_three_keys_equals_the_worked_example() -> None:
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    scores = q @ k.T
    assert scores.tolist() == [[1, 0, 1]]
    assert (scores / math.sqrt(2))[0].tolist() == pytest.approx([0.7071, 0, 0.7071], abs=1e-4)
    assert (scores / math.sqrt(2)).exp().sum().item() == pytest.approx(5.0562, abs=1e-4)
    weights, out = one_head(q, k, torch.tensor([[10.0], [20.0], [30.0]]), Full())
    assert weights[0].tolist() == pytest.approx([0.4011, 0.1978, 0.4011], abs=1e-4)
    assert out.item() == pytest.approx(20.0, abs=1e-14)


@pytest.mark.ledger("attn.eye3")
def test_three_orthonormal_tokens_equal_the_worked_example() -> None:
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    weights, out = one_head(torch.eye(3), torch.eye(3), v, Full())
    assert torch.equal(torch.eye(3) @ torch.eye(3).T, torch.eye(3))  # the keys are orthonormal
    expected = torch.full((3, 3), 0.2645).fill_diagonal_(0.4711)
    assert (weights - expected).abs().max() < 1e-4
    assert (out - torch.tensor([[1, 0.7934], [0.7934, 1], [1.2066, 1.2066]])).abs().max() < 1e-4
    assert out.min() >= 0
    assert out.max() <= 2


@pytest.mark.ledger("attn.toy5.single")
def test_five_tokens_with_one_head_equal_the_results_of_r(toy: tuple[RGenerator, Tensor]) -> None:
    x = [
        [1.434, 1.452, 0.343, 2.194],
        [0.764, -1.418, 1.582, 0.518],
        [1.648, -0.418, -0.727, 2.318],
        [-1.617, -1.255, 0.337, -0.130],
        [-0.827, 0.910, -1.390, 0.073],
    ]
    assert rounds_to(toy[1], x)
    _, weights, out = self_attention(toy, Full())
    assert rounds_to(
        weights,
        [
            [0.000, 1.000, 0.000, 0.000, 0.000],
            [0.052, 0.001, 0.000, 0.002, 0.944],
            [0.000, 1.000, 0.000, 0.000, 0.000],
            [0.956, 0.000, 0.014, 0.000, 0.029],
            [0.001, 0.054, 0.944, 0.001, 0.000],
        ],
    )
    assert rounds_to(
        out,
        [
            [-2.871, -1.431, -1.750, -0.112],
            [1.710, 0.491, 1.361, 0.276],
            [-2.871, -1.431, -1.750, -0.112],
            [-2.388, 3.451, 1.082, 2.614],
            [-0.992, 1.186, 2.077, 2.846],
        ],
    )
    assert (weights.sum(-1) - 1).abs().max() < 1e-8
    assert rounds_to(row_entropy(weights), [[0.000, 0.231, 0.000, 0.215, 0.226]])
    assert math.log(5) == pytest.approx(1.609, abs=5e-4)


@pytest.mark.ledger("attn.scale.assumption")
def test_unscaled_projections_make_sharp_weights(toy: tuple[RGenerator, Tensor]) -> None:
    scores, weights, _ = self_attention(toy, Full())
    assert scores.std(correction=0).item() == pytest.approx(6.6, abs=0.05)
    entropies = row_entropy(weights)
    assert entropies.max() < 0.2315
    assert (entropies < 5e-4).sum() == 2


@pytest.mark.ledger("mask.toy5")
def test_five_tokens_with_a_causal_mask_equal_the_results_of_r(toy: tuple[RGenerator, Tensor]) -> None:
    _, weights, _ = self_attention(toy, Causal())
    assert rounds_to(
        weights,
        [
            [1.000, 0.000, 0.000, 0.000, 0],
            [0.978, 0.022, 0.000, 0.000, 0],
            [0.000, 1.000, 0.000, 0.000, 0],
            [0.984, 0.001, 0.015, 0.000, 0],
            [0.001, 0.054, 0.944, 0.001, 0],
        ],
    )
    for n in range(1, 18):
        q, k = torch.randn(2, n, 4)
        weights, _ = one_head(q, k, k, Causal())
        assert torch.equal(weights, weights.tril())
        assert torch.allclose(weights.sum(-1), torch.ones(n, dtype=torch.float64))
        assert (weights == 0).sum() == n * (n - 1) // 2


@pytest.mark.ledger("mha.toy2")
def test_five_tokens_with_two_heads_equal_the_results_of_r(toy: tuple[RGenerator, Tensor]) -> None:
    x, r = toy[1], RGenerator(7)
    heads = [one_head(*(x @ r.matrix(4, 2) for _ in range(3)), Full()) for _ in range(2)]
    for weights, _ in heads:
        assert (weights.sum(-1) - 1).abs().max() < 1e-8
    out = torch.cat([out for _, out in heads], -1) @ r.matrix(4, 4)
    assert rounds_to(
        out,
        [
            [-1.406, -4.674, -0.573, -1.912],
            [0.054, -2.120, 0.296, -1.767],
            [-0.154, -0.697, -1.257, -0.058],
            [1.024, 1.931, -0.848, 0.558],
            [-1.275, -1.998, -3.874, 0.231],
        ],
    )


@pytest.mark.ledger("attn.scale.table")
def test_standard_deviation_of_scores_is_the_root_of_the_width() -> None:
    r, expected = RGenerator(1), {4: (2.010, 1.005), 16: (4.017, 1.004), 64: (8.070, 1.009), 256: (16.089, 1.006)}
    for width, (raw, scaled) in expected.items():
        scores = r.rnorm(20_000, 2, width).prod(1).sum(-1)  # 20,000 pairs; each query is drawn before its key
        assert scores.std().item() == pytest.approx(raw, abs=5e-4)
        assert (scores / math.sqrt(width)).std().item() == pytest.approx(scaled, abs=5e-4)
        assert raw == pytest.approx(math.sqrt(width), rel=0.02)
    assert math.sqrt(128) == pytest.approx(11.31, abs=5e-3)
    smaller_weight = torch.tensor([11.0, -11.0], dtype=torch.float64).softmax(-1)[1].item()
    assert smaller_weight == pytest.approx(2.8e-10, rel=0.01)
