"""Identities, inequalities and limits of attention that hold for all inputs, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.functional import jacobian
from torch.utils.flop_counter import FlopCounterMode

from regard.kernels.attention import BACKENDS, backend
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.reference import attend, attention_weights
from regard.layout import TokenLayout
from regard.lens.maps import row_entropy
from tests.kernels.cases import ON_GPU

MASKS = {"full": Full(), "causal": Causal()}

DENSE = sorted(BACKENDS.keys() - ON_GPU - {"block_sparse"})  # block_sparse supports sparse patterns only


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def last_queries(queries: int, keys: int) -> TokenLayout:
    """The layout of the last queries of a sequence with all its keys."""
    return TokenLayout(torch.arange(keys - queries, keys).unsqueeze(0)).with_keys(torch.arange(keys).unsqueeze(0))


def scaled(q: Tensor, mask: Mask = MASKS["full"]) -> ScoreOptions:
    return ScoreOptions(mask, q.shape[-1] ** -0.5)


def weights_of_scores(scores: Tensor) -> Tensor:
    """The attention weights of one query with these scores (n,), computed with unit vectors as keys."""
    n = len(scores)
    keys = torch.eye(n, dtype=scores.dtype)[None, None]
    return attention_weights(scores.view(1, 1, 1, n), keys, last_queries(1, n), ScoreOptions(Full())).flatten()


def softmax_jacobian(scores: Tensor) -> Tensor:
    found = jacobian(weights_of_scores, scores)
    assert isinstance(found, Tensor)
    return found


def spectral_norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix, 2).item()


@pytest.mark.ledger("attn.sdpa")
@pytest.mark.parametrize("name", DENSE)
def test_attention_equals_that_of_pytorch(name: str) -> None:
    q, k, v = (random(1, 8, 10, 64, seed=n) for n in range(3))
    found = backend(name)(q, k, v, TokenLayout.whole(1, 10), scaled(q))
    assert (found - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-12
    i, s = 3, q[0, 0, 3] @ k[0, 0].T / 8  # the formula of one row
    assert (found[0, 0, i] - s.softmax(-1) @ v[0, 0]).abs().max() < 1e-12
    inputs = tuple(random(1, 2, 4, 3, seed=n).requires_grad_() for n in range(3))
    assert gradcheck(lambda q, k, v: backend(name)(q, k, v, TokenLayout.whole(1, 4), scaled(q)), inputs, fast_mode=True)


@pytest.mark.ledger("attn.rect")
@pytest.mark.parametrize("name", BACKENDS)
def test_queries_and_keys_may_differ_in_number_and_keys_and_values_in_dim(name: str) -> None:
    q, k, v = random(1, 2, 3, 4), random(1, 2, 7, 4, seed=1), random(1, 2, 7, 5, seed=2)
    layout, options = last_queries(3, 7), scaled(q)
    if BACKENDS[name].unsupported_reason(describe(q, k, v, layout, options)):
        with pytest.raises(ValueError, match=name):
            backend(name)(q, k, v, layout, options)
        return
    out = backend(name)(q, k, v, layout, options)
    assert out.shape == (1, 2, 3, 5)
    assert attention_weights(q, k, layout, options).shape == (1, 2, 3, 7)
    assert (out - (q @ k.mT / 2).softmax(-1) @ v).abs().max() < 1e-12


@pytest.mark.ledger("attn.lookup")
def test_low_temperature_selects_one_value_and_high_temperature_averages() -> None:
    q, k, v = random(1, 1, 6, 4), random(1, 1, 9, 4, seed=1), random(1, 1, 9, 3, seed=2)
    best = (q @ k.mT).argmax(-1)[0, 0]
    cold, hot = (
        attend(q, k, v, last_queries(6, 9), ScoreOptions(Full(), 1 / temperature)) for temperature in (1e-4, 1e9)
    )
    assert (cold - v[:, :, best]).abs().max() < 1e-12
    assert (hot - v.mean(2, keepdim=True)).abs().max() < 1e-8
    aligned, orthogonal = weights_of_scores(torch.tensor([4.0, 0.0], dtype=torch.float64))
    assert aligned > 0.98
    assert orthogonal < 0.02


@pytest.mark.ledger("attn.scale.var")
@pytest.mark.parametrize("width", [4, 16, 64, 256])
def test_variance_of_scores_is_the_width(width: int) -> None:
    draws = 20_000
    scores = random(2, draws, width, seed=width).prod(0).sum(-1)
    assert abs(scores.mean()) < 3 * math.sqrt(width / draws)
    error = math.sqrt((2 * width**2 + 6 * width) / draws)  # of the variance: E s⁴ = 3d² + 6d for normal entries
    assert abs(scores.var() - width) < 3 * error
    assert abs((scores / math.sqrt(width)).var() - 1) < 3 * error / width


@pytest.mark.ledger("attn.scale.gotcha")
def test_dividing_by_the_width_instead_of_its_root_makes_weights_uniform() -> None:
    """Scores divided by d_k have a deviation of 1/√d_k: the entropy is below its maximum by O(1/d_k)."""
    deficits = {0.5: [], 1.0: []}
    for width in (16, 64, 256, 1024):
        q, k = random(1, 8, 64, width, seed=width), random(1, 8, 64, width, seed=width + 1)
        for power, found in deficits.items():
            weights = attention_weights(q, k, TokenLayout.whole(1, 64), ScoreOptions(Full(), width**-power))
            found.append(math.log(64) - row_entropy(weights).mean().item())
    assert deficits[0.5] == pytest.approx([deficits[0.5][0]] * 4, rel=0.1)
    assert [x / y for x, y in zip(deficits[1.0], deficits[1.0][1:], strict=False)] == pytest.approx([4] * 3, rel=0.1)


@pytest.mark.ledger("attn.jac.form")
def test_softmax_jacobian_equals_its_formula() -> None:
    for seed in range(5):
        scores = 2 * random(7, seed=seed)
        a, found = weights_of_scores(scores), softmax_jacobian(scores)
        assert (found - (a.diag() - a.outer(a))).abs().max() < 1e-14
        assert (found - found.T).abs().max() < 1e-14
        assert torch.linalg.eigvalsh(found).min() > -1e-14
        assert found.sum(-1).abs().max() < 1e-14


@pytest.mark.ledger("attn.jac.half")
def test_softmax_jacobian_has_norm_at_most_one_half() -> None:
    scores = random(20_000, 5) * torch.linspace(0.01, 20, 20_000, dtype=torch.float64).unsqueeze(-1)
    a = scores.softmax(-1)
    jacobians = a.diag_embed() - a.unsqueeze(-1) * a.unsqueeze(-2)
    assert torch.linalg.matrix_norm(jacobians, 2).max() <= 0.5
    assert jacobians.diagonal(dim1=-2, dim2=-1).max() <= 0.25
    uniform = softmax_jacobian(torch.zeros(2, dtype=torch.float64))
    assert spectral_norm(uniform) == pytest.approx(0.5, abs=1e-15)
    assert uniform.diagonal().tolist() == [0.25, 0.25]
    with_third_key = [
        spectral_norm(softmax_jacobian(torch.tensor([0.0, 0.0, -gap], dtype=torch.float64))) for gap in (1, 5, 20)
    ]
    assert with_third_key == sorted(with_third_key)  # with a third key the norm approaches one half
    assert 0.5 - 1e-8 < with_third_key[-1] < 0.5


@pytest.mark.ledger("attn.jac.gap")
def test_gradients_decay_exponentially_with_the_gap_of_scores() -> None:
    n = 9
    for seed in range(50):
        scores = (1 + seed / 5) * random(n, seed=seed)
        first, second = scores.topk(2).values
        bound = (n - 1) * math.exp(second - first)
        assert 1 - weights_of_scores(scores).max() <= bound
        assert spectral_norm(softmax_jacobian(scores)) <= 2 * bound
    for gap in (10.0, 20.0, 30.0):  # the bound is tight if all other scores are equal
        tied = torch.tensor([gap] + [0.0] * (n - 1), dtype=torch.float64)
        other_weights = weights_of_scores(tied)[1:].sum().item()
        assert other_weights == pytest.approx((n - 1) * math.exp(-gap), rel=1.1 * (n - 1) * math.exp(-gap) + 1e-12)
        assert softmax_jacobian(tied).abs().max() < 10 * math.exp(-gap)
    gaps = []
    for width in (16, 64, 256):
        q, k = random(2000, 1, width, seed=width), random(2000, n, width, seed=width + 1)
        highest = (q @ k.mT).topk(2).values
        gaps.append((highest[..., 0] - highest[..., 1]).mean().item())
    assert [y / x for x, y in zip(gaps, gaps[1:], strict=False)] == pytest.approx([2, 2], rel=0.1)


@pytest.mark.ledger("attn.jac.uniform")
@pytest.mark.parametrize(("n", "expected"), [(2, 0.5), (5, 0.2), (100, 0.01)])
def test_jacobian_of_uniform_weights_has_norm_one_over_n(n: int, expected: float) -> None:
    assert spectral_norm(softmax_jacobian(torch.zeros(n, dtype=torch.float64))) == pytest.approx(expected, abs=1e-15)


class ManualBackward(torch.autograd.Function):
    """Attention whose backward is the formula of its gradient."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        a = attention_weights(q, k, TokenLayout.whole(1, q.shape[2]), scaled(q, mask))
        ctx.save_for_backward(q, k, v, a)
        return a @ v

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (g,), (q, k, v, a) = gradients, ctx.saved_tensors
        da = g @ v.mT
        ds = a * (da - (da * a).sum(-1, keepdim=True))
        return ds @ k / math.sqrt(q.shape[-1]), ds.mT @ q / math.sqrt(q.shape[-1]), a.mT @ g, None


@pytest.mark.ledger("attn.backward")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_backward_equals_its_formula(mask: Mask) -> None:
    q, k, v, g = (random(1, 2, 6, 4, seed=n).requires_grad_(n < 3) for n in range(4))
    found = torch.autograd.grad(ManualBackward.apply(q, k, v, mask), (q, k, v), g)
    expected = torch.autograd.grad(attend(q, k, v, TokenLayout.whole(1, 6), scaled(q, mask)), (q, k, v), g)
    for f, e in zip(found, expected, strict=True):
        assert (f - e).abs().max() < 1e-12
    assert gradcheck(lambda q, k, v: ManualBackward.apply(q, k, v, mask), (q, k, v), fast_mode=True)
    assert (found[0] * math.sqrt(4) - expected[0]).abs().max() > 0.1  # without the factor the gradient differs


def kernel_regression(q: Tensor, k: Tensor, v: Tensor, kernel, causal: bool) -> Tensor:
    """The Nadaraya-Watson estimate at each query: the mean of the values, weighted by a kernel of query and key."""
    out = []
    for i, query in enumerate(q):
        pairs = list(zip(k, v, strict=True))[: i + 1 if causal else None]
        weights = [kernel(query, key) for key, _ in pairs]
        out.append(sum(w * value for w, (_, value) in zip(weights, pairs, strict=True)) / sum(weights))
    return torch.stack(out)


@pytest.mark.ledger("attn.kernel")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_equals_kernel_regression(mask: Mask) -> None:
    q, k, v = (random(6, 4, seed=n) for n in range(3))
    expected = kernel_regression(q, k, v, lambda q, k: torch.exp(q @ k / 2), mask.causal)
    found = attend(q[None, None], k[None, None], v[None, None], TokenLayout.whole(1, 6), scaled(q, mask))
    assert (found[0, 0] - expected).abs().max() < 1e-12


@pytest.mark.ledger("attn.kernel.gauss")
def test_with_keys_of_equal_norm_the_kernel_is_gaussian() -> None:
    """Its variance is √d_k, so its bandwidth is the fourth root of d_k and not √d_k."""
    width = 16
    q, k, v = (random(8, width, seed=n) for n in range(3))
    k = 3 * k / k.norm(dim=-1, keepdim=True)

    def gauss(bandwidth: float) -> Tensor:
        return kernel_regression(q, k, v, lambda q, k: torch.exp(-(q - k).square().sum() / (2 * bandwidth**2)), False)

    found = attend(q[None, None], k[None, None], v[None, None], TokenLayout.whole(1, 8), scaled(q))[0, 0]
    assert (found - gauss(width**0.25)).abs().max() < 1e-14
    assert (found - gauss(width**0.5)).abs().max() > 0.1


@pytest.mark.ledger("attn.hull")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_outputs_are_in_the_convex_hull_of_the_values(mask: Mask) -> None:
    directions = torch.cat([torch.eye(3, dtype=torch.float64), random(200, 3)])  # coordinate axes and random directions
    for seed in range(20):
        q, k, v = (3 * random(1, 2, 7, 3, seed=3 * seed + n) for n in range(3))
        weights = attention_weights(q, k, TokenLayout.whole(1, 7), scaled(q, mask))
        assert weights.min() >= 0
        assert (weights.sum(-1) - 1).abs().max() < 1e-14
        projected_outputs, projected_values = (
            x @ directions.T for x in (attend(q, k, v, TokenLayout.whole(1, 7), scaled(q, mask)), v)
        )
        assert (projected_outputs.amax(2) <= projected_values.amax(2) + 1e-12).all()
        assert (projected_outputs.amin(2) >= projected_values.amin(2) - 1e-12).all()


@pytest.mark.ledger("attn.softmax")
@pytest.mark.parametrize("name", DENSE)
def test_softmax_is_over_keys_and_does_not_overflow(name: str) -> None:
    q, k = random(1, 1, 5, 4), random(1, 1, 5, 4, seed=1)
    weights = attention_weights(q, k, TokenLayout.whole(1, 5), scaled(q))
    assert (weights.sum(-1) - 1).abs().max() < 1e-14
    assert (weights.sum(-2) - 1).abs().max() > 0.1
    ones = torch.ones_like(k)
    shifted = attention_weights(
        torch.cat([q, ones], -1), torch.cat([k, 7 * ones], -1), TokenLayout.whole(1, 5), scaled(q)
    )
    assert (shifted - weights).abs().max() < 1e-14  # every score of a row grew by 14
    for dtype in (torch.float32, torch.float64):
        large_queries = torch.cat([1e4 * torch.ones(1, 1, 5, 1), q], -1).to(dtype)
        keys = torch.cat([torch.ones(1, 1, 5, 1), k], -1).to(dtype)
        out = backend(name)(large_queries, keys, keys, TokenLayout.whole(1, 5), ScoreOptions(Causal()))
        assert out.isfinite().all()
        assert (out[..., 0] - 1).abs().max() < 1e-5


@pytest.mark.ledger("attn.linear.v")
def test_attention_is_linear_in_the_values_only() -> None:
    q, k, v, w = (random(1, 2, 6, 4, seed=n) for n in range(4))
    layout = TokenLayout.whole(1, 6)

    def attend_to(values: Tensor, q: Tensor = q) -> Tensor:
        return attend(q, k, values, layout, scaled(q, Causal()))

    assert (attend_to(2 * v - 3 * w) - (2 * attend_to(v) - 3 * attend_to(w))).abs().max() < 1e-13
    assert (attend_to(v, 2 * q) - 2 * attend_to(v)).abs().max() > 0.1


@pytest.mark.ledger("attn.cost")
def test_flops_and_weights_are_quadratic_in_the_length() -> None:
    for length, entries in ((1_000, 10**6), (2_000, 4 * 10**6), (100_000, 10**10)):
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            q, k, v = torch.empty(1, 1, length, 16), torch.empty(1, 1, length, 16), torch.empty(1, 1, length, 24)
            layout = TokenLayout.whole(1, length, "meta")
            out = attend(q, k, v, layout, scaled(q))
            assert attention_weights(q, k, layout, scaled(q)).numel() == entries
        assert out.shape == (1, 1, length, 24)
        scores, weighted_sum = 2 * length**2 * 16, 2 * length**2 * 24
        assert counter.get_total_flops() == scores + weighted_sum + scores  # attention_weights computes them again
