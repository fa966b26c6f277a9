"""The HiPPO matrix: stable powers, reconstruction of the past input from the state, and its other bases."""

import pytest
import torch
from torch import Tensor

from regard.kernels.recurrent.state_space.discretise import bilinear
from regard.kernels.recurrent.state_space.hippo import DIAGONALS, legs, normal_plus_low_rank, reconstruct
from regard.kernels.recurrent.state_space.kernel import System, driven
from regard.kernels.recurrent.state_space.transition import DenseTransition
from tests.kernels.systems import random


def norms_of_powers(A: Tensor, steps: list[int]) -> list[float]:
    """The spectral norms of these powers of the discretised matrix."""
    Ab, _ = bilinear(A, A[0], 0.1)
    return [torch.linalg.matrix_norm(torch.linalg.matrix_power(Ab, k), 2).item() for k in steps]


@pytest.mark.ledger("ssm.hippo")
def test_powers_of_random_matrices_explode_or_vanish_and_those_of_hippo_do_not() -> None:
    size, lags = 32, [1, 10, 100, 1000]
    matrix = random(size, size) / size**0.5
    identity = torch.eye(size, dtype=torch.float64)
    assert norms_of_powers(matrix, lags)[-1] > 1e20
    assert norms_of_powers(matrix - 1.5 * identity, lags)[-1] < 1e-12
    hippo = norms_of_powers(legs(size)[0], lags)
    assert max(hippo) <= 1 + 1e-12  # no power is larger than 1
    assert hippo == sorted(hippo, reverse=True)


@pytest.mark.ledger("ssm.hippo")
def test_larger_states_reconstruct_the_past_better() -> None:
    step, length = 0.002, 4000
    time = torch.arange(length, dtype=torch.float64) * step
    u = torch.sin(3 * time) + 0.5 * torch.cos(7.3 * time)
    errors = {}
    for size in (4, 8, 16, 32, 64):
        Ab, Bb = bilinear(*legs(size), step)
        x = driven(System(DenseTransition(Ab[None]), Bb[None], Bb[None]), u[None, None])[0, 0]
        difference = reconstruct(x, time[:1500]) - u.flip(0)[:1500]
        errors[size] = difference.square().mean().sqrt().item()
        recent = difference[:300].square().mean().sqrt().item()
        assert recent < errors[size]  # the recent past is reconstructed more accurately
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert errors[4] > 0.5 and errors[64] < 0.02
    assert u.square().mean().sqrt() > 0.7


def test_reconstruction_is_a_legendre_series() -> None:
    """A polynomial in e^-age of degree 2 is reconstructed from its projection on the basis."""
    grid = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000  # of e^-age
    expected = 1 - 2 * grid + 3 * grid**2
    basis = reconstruct(torch.eye(5, dtype=torch.float64), -grid.log())  # (N, M)
    assert (basis @ basis.T / 20000 - torch.eye(5, dtype=torch.float64)).abs().max() < 1e-6
    assert (reconstruct(basis @ expected / 20000, -grid.log()) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("size", [2, 8, 64])
def test_normal_plus_low_rank_is_the_hippo_matrix_in_another_basis(size: int) -> None:
    A, b = legs(size)
    values, P, B = normal_plus_low_rank(size)
    rotations = torch.stack(
        [torch.stack([values.real, -values.imag], -1), torch.stack([values.imag, values.real], -1)], -2
    )
    transformed = torch.block_diag(*rotations) - torch.outer(P, P)
    x, y = b, B
    for _ in range(4):  # BᵀAᵏB does not depend on the basis
        assert torch.allclose(b @ x, B @ y, rtol=1e-9)
        x, y = A @ x, transformed @ y
    assert torch.allclose(A.trace(), transformed.trace())
    assert torch.allclose(values.real, torch.tensor(-0.5, dtype=torch.float64))


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_equal_their_formulas(name: str) -> None:
    values = DIAGONALS[name](64)
    n = torch.arange(32, dtype=torch.float64)
    assert values.shape == (32,) and (values.real < 0).all() and (values.imag >= 0).all()
    formulas = {"lin": torch.pi * n, "inv": 64 / torch.pi * (64 / (2 * n + 1) - 1), "real": 0 * n}
    if name in formulas:
        assert torch.allclose(values.imag, formulas[name])
    else:  # "inv" approximates it
        ratio = values.imag / formulas["inv"].flip(0)
        assert ratio.min() > 0.8 and ratio.max() < 1.3
        assert ratio[-1] == pytest.approx(1, abs=0.02)
