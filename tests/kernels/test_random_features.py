"""Random features of the Performer estimate the softmax without bias and overflow; more features reduce the error."""

import pytest
import torch
from torch import Tensor

from regard.kernels.random_features import draw_directions, log_features, running_peak, softmax_error


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def estimate(q: Tensor, k: Tensor, count: int) -> Tensor:
    """The estimates of exp(q·k / √E) for all pairs."""
    directions = draw_directions(count, q.shape[-1]).double()
    return log_features(q, directions).exp() @ log_features(k, directions).exp().mT / count


def test_directions_are_orthogonal_with_the_lengths_of_normal_vectors() -> None:
    directions = draw_directions(4000, 8).double()
    for block in directions.split(8)[:20]:
        lengths = block.norm(dim=-1)
        assert (block @ block.T - lengths.square().diag()).abs().max() < 1e-5
    assert directions.square().sum(-1).mean() == pytest.approx(8, rel=0.05)
    assert (directions.T @ directions / 4000 - torch.eye(8)).abs().max() < 0.1


@pytest.mark.ledger("lin.performer")
def test_estimate_is_unbiased_with_error_of_one_over_root_count() -> None:
    q, k = random(6, 4, seed=1) / 2, random(5, 4, seed=2) / 2
    exact = (q @ k.T / 2).exp()
    errors = {}
    for count in (16, 64, 256):
        estimates = torch.stack([estimate(q, k, count) for _ in range(100)])  # (draws, 6, 5)
        errors[count] = ((estimates - exact) / exact).square().mean(0)
    for count in (16, 64):  # four times the features, half the error
        assert (errors[count].mean() / errors[4 * count].mean()).sqrt().item() == pytest.approx(2, rel=0.2)
    standard_error = (errors[256] * 256 / 20_000).sqrt()
    assert (((estimate(q, k, 20_000) - exact) / exact).abs() < 5 * standard_error).all()


@pytest.mark.ledger("lin.performer")
def test_rank_is_at_most_the_number_of_features() -> None:
    q, k = random(20, 6, seed=3), random(20, 6, seed=4)
    rank = torch.linalg.matrix_rank
    assert rank((q @ k.T / 6**0.5).exp()) == 20
    assert [rank(estimate(q, k, count)).item() for count in (3, 7)] == [3, 7]


def test_softmax_error_falls_with_the_number_of_features() -> None:
    q, k = random(30, 8, seed=5) / 2, random(30, 8, seed=6) / 2
    errors = [softmax_error(q, k, draw_directions(count, 8).double()) for count in (4, 64, 1024)]
    assert all(((e >= 0) & (e <= 1)).all() for e in errors)
    assert errors[0].mean() > 2 * errors[1].mean() > 6 * errors[2].mean()


def test_running_peaks_never_decrease_and_bound_the_logarithms() -> None:
    logs = 500 * random(2, 3, 9, 4)
    logs[:, :, :2] = -torch.inf  # padding
    peaks, log_decay, last = running_peak(logs, torch.full((2, 3), -torch.inf, dtype=torch.float64))
    assert ((logs - peaks.unsqueeze(-1)) <= 0).all()
    assert (log_decay <= 0).all() and log_decay.isfinite().all()
    assert torch.equal(last, logs.amax((2, 3)))
    assert not log_decay[:, :, :3].any()  # no decay before the first valid token
    assert torch.allclose(log_decay[:, :, 3:].sum(-1), peaks[:, :, 2] - last)
