"""A linear system is the same function as a recurrence, as a convolution and as a differential equation."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from regard.kernels.recurrent.state_space import document_chunks, state_space
from regard.kernels.recurrent.state_space.discretise import (
    bilinear,
    bilinear_diagonal,
    zero_order_hold,
    zero_order_hold_diagonal,
)
from regard.kernels.recurrent.state_space.hippo import DIAGONALS, legs, normal_plus_low_rank
from regard.kernels.recurrent.state_space.kernel import System, convolve, flops, kernel
from regard.kernels.recurrent.state_space.transition import DenseTransition, DiagonalTransition, as_complex, as_real
from tests.kernels.systems import KINDS, loop, random, system

B, D, N = 2, 3, 8


def simulated(A: Tensor, B: Tensor, u, time: float, steps: int) -> Tensor:
    """x(time) of x' = Ax + Bu(t), x(0) = 0, by the Runge-Kutta method of order four."""
    x, h = torch.zeros_like(B), time / steps

    def slope(x: Tensor, t: float) -> Tensor:
        return A @ x + B * u(t)

    for n in range(steps):
        t = n * h
        k1 = slope(x, t)
        k2 = slope(x + h / 2 * k1, t + h / 2)
        k3 = slope(x + h / 2 * k2, t + h / 2)
        k4 = slope(x + h * k3, t + h)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x


@pytest.mark.ledger("ssm.lti")
@pytest.mark.parametrize("rule", [zero_order_hold, bilinear])
def test_small_steps_follow_the_differential_equation(rule) -> None:
    """x' = Ax + Bu, y = Cx + Du with a state of 64 elements."""
    values = DIAGONALS["lin"](64)
    rotations = torch.stack([torch.stack([values.real, -values.imag]), torch.stack([values.imag, values.real])])
    A = torch.block_diag(*(rotations[..., n] / 20 for n in range(32)))  # (64, 64)
    b, c, skip = random(64), random(64, seed=1), 0.3
    u, time = (lambda t: math.sin(2 * t) + 0.5), 2.0
    expected = c @ simulated(A, b, u, time, 200) + skip * u(time)
    errors = []
    for steps in (50, 100, 200):
        Ab, Bb = rule(A, b, time / steps)
        x = torch.zeros(64, dtype=torch.float64)
        for n in range(1, steps + 1):
            x = Ab @ x + Bb * u(n * time / steps)
        assert x.shape == (64,)
        errors.append((c @ x + skip * u(time) - expected).abs().item())
    assert errors[2] < 0.05 * expected.abs()
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.2)  # u is held for a step, which is first order


@pytest.mark.ledger("ssm.discretise")
def test_discretisation_equals_its_formula_and_has_its_order() -> None:
    A, b = random(5, 5) / 2 - torch.eye(5, dtype=torch.float64), random(5, seed=1)
    step, identity = 0.3, torch.eye(5, dtype=torch.float64)
    held, b_held = zero_order_hold(A, b, step)
    assert torch.allclose(held, torch.linalg.matrix_exp(step * A), atol=1e-12)
    assert torch.allclose(b_held, torch.linalg.inv(A) @ (held - identity) @ b, atol=1e-12)
    assert torch.allclose(b_held, simulated(A, b, lambda t: 1.0, step, 100), atol=1e-9)  # exact for a constant input
    transformed, b_transformed = bilinear(A, b, step)
    assert torch.allclose(
        transformed, torch.linalg.inv(identity - step / 2 * A) @ (identity + step / 2 * A), atol=1e-12
    )
    assert torch.allclose(b_transformed, torch.linalg.inv(identity - step / 2 * A) @ (step * b), atol=1e-12)
    exact, errors = torch.linalg.matrix_exp(2 * A), {zero_order_hold: [], bilinear: []}
    for rule, rule_errors in errors.items():
        for steps in (20, 40, 80):
            rule_errors.append((torch.linalg.matrix_power(rule(A, b, 2 / steps)[0], steps) - exact).abs().max().item())
    assert max(errors[zero_order_hold]) < 1e-12
    assert errors[bilinear][0] / errors[bilinear][1] == pytest.approx(4, rel=0.1)
    assert errors[bilinear][1] / errors[bilinear][2] == pytest.approx(4, rel=0.1)


@pytest.mark.ledger("ssm.discretise")
@pytest.mark.parametrize(
    ("full", "diagonal"), [(zero_order_hold, zero_order_hold_diagonal), (bilinear, bilinear_diagonal)]
)
def test_diagonal_discretisation_equals_that_of_the_matrix(full, diagonal) -> None:
    values = DIAGONALS["inv"](8).unsqueeze(0)
    b = torch.complex(random(1, 4), random(1, 4, seed=1))
    found, b_found = diagonal(values, b, torch.tensor([[0.2]], dtype=torch.float64))
    expected, b_expected = full(values[0].diag(), b[0], 0.2)
    assert (found[0].diag() - expected).abs().max() < 1e-12
    assert (b_found[0] - b_expected).abs().max() < 1e-12
    assert found.abs().max() < 1  # a stable system stays stable


def test_zero_order_hold_of_a_singular_matrix_is_exact() -> None:
    A, b = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0])
    Ab, Bb = zero_order_hold(A, b, 0.5)
    assert torch.allclose(Ab, torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    assert torch.allclose(Bb, torch.tensor([0.125, 0.5]))


@pytest.mark.parametrize("kind", KINDS)
def test_transitions_equal_their_matrices(kind: str) -> None:
    model = system(kind, D, N)
    unit = torch.eye(N, dtype=torch.float64).unsqueeze(1).expand(-1, D, -1)
    matrix = (model.transition @ unit).permute(1, 2, 0)  # (D, N, N)
    x = random(B, D, N, seed=3)
    for form, dense in (
        (model.transition, matrix),
        (model.transition.mT, matrix.mT),
        (model.transition.squared(), matrix @ matrix),
    ):
        assert (form @ x - DenseTransition(dense) @ x).abs().max() < 1e-12


@pytest.mark.ledger("ssm.recurrence")
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_whole_and_are_linear(kind: str) -> None:
    model, state = system(kind, D, N), torch.zeros(B, D, N, dtype=torch.float64)
    u, other = random(B, 40, D), random(B, 40, D, seed=1)
    whole, last = state_space(model, u, state)
    for t in range(40):
        y, state = state_space(model, u[:, t : t + 1], state)
        assert (y - whole[:, t : t + 1]).abs().max() < 1e-12
        assert state is not None and state.shape == (B, D, N)
    assert (state - last).abs().max() < 1e-12
    mixed = state_space(model, 2 * u - 3 * other)[0]
    assert (mixed - 2 * whole + 3 * state_space(model, other)[0]).abs().max() < 1e-12


@pytest.mark.ledger("ssm.convolution")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 37, 100])
def test_recurrence_equals_direct_sum_and_fft(kind: str, length: int) -> None:
    model, u = system(kind, D, N), random(B, length, D)
    K = kernel(model, length, torch.float64)  # (D, L)
    direct = torch.stack([(K[:, : t + 1].flip(1) * u[:, : t + 1].mT).sum(-1) for t in range(length)], 1)
    recurrent, _ = loop(model, u, torch.zeros(B, D, N, dtype=torch.float64))
    assert (direct - recurrent).abs().max() < 1e-12
    assert (convolve(u.mT, K).mT - recurrent).abs().max() < 1e-12
    circular = torch.fft.irfft(torch.fft.rfft(u.mT) * torch.fft.rfft(K), length).mT
    assert length == 1 or (circular - recurrent).abs().max() > 1e-3  # without padding the convolution is circular
    without_first_input = u.clone()
    without_first_input[:, 0] = 0  # as if x_0 = 0 instead of x_{-1} = 0
    assert (state_space(model, without_first_input)[0] - recurrent).abs().max() > 1e-3


@pytest.mark.ledger("ssm.scalar")
def test_impulse_response_of_a_scalar_system_decays_geometrically() -> None:
    def scalar(a: float) -> System:
        values = torch.tensor([[a]], dtype=torch.complex128)
        return System(DiagonalTransition(values), *(torch.tensor([[v, 0.0]], dtype=torch.float64) for v in (0.5, 1.0)))

    impulse = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64).view(1, 6, 1)
    expected = torch.tensor([0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245], dtype=torch.float64)
    whole, _ = state_space(scalar(0.9), impulse)
    steps, state = [], torch.zeros(1, 1, 2, dtype=torch.float64)
    for t in range(6):
        y, state = state_space(scalar(0.9), impulse[:, t : t + 1], state)
        steps.append(y)
    for found in (whole, torch.cat(steps, 1), kernel(scalar(0.9), 6, torch.float64).mT[None]):
        assert (found.flatten() - expected).abs().max() < 1e-12
    half_life = {a: math.log(0.5) / math.log(a) for a in (0.5, 0.9, 0.99)}
    assert half_life[0.9] == pytest.approx(6.6, abs=0.05)
    for a, half_life_steps in half_life.items():
        K = kernel(scalar(a), 100, torch.float64)[0]
        assert int((K / K[0] > 0.5).sum()) == math.ceil(half_life_steps - 1e-9)


@pytest.mark.ledger("ssm.s4")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 500])
def test_kernel_equals_repeated_products(kind: str, length: int) -> None:
    model = system(kind, D, N)
    x, expected = model.b, []
    for _ in range(length):
        expected.append((model.c * x).sum(-1))
        x = model.transition @ x
    found = kernel(model, length, torch.float64)
    assert (found - torch.stack(expected, -1)).abs().max() < 1e-12


@pytest.mark.ledger("ssm.s4")
def test_low_rank_kernel_equals_that_of_the_hippo_matrix() -> None:
    """The expected kernel is computed with full matrices; with C = Bᵀ the kernel does not depend on the basis."""
    A, b = legs(N)
    values, P, rotated = normal_plus_low_rank(N)
    model = system("s4", 1, N, step=0.05)
    model = System(model.transition, model.b, rotated.unsqueeze(0))
    Ab, Bb = bilinear(A, b, 0.05)
    expected = [b @ torch.linalg.matrix_power(Ab, k) @ Bb for k in range(200)]
    assert (kernel(model, 200, torch.float64)[0] - torch.stack(expected)).abs().max() < 1e-10
    product = as_real(values * as_complex(rotated)) - P * (P @ rotated)  # A b in the other basis
    assert (product.norm() - (A @ b).norm()).abs() < 1e-10


@pytest.mark.ledger("ssm.s4")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 5, 40])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("padded", [False, True], ids=["valid", "padded"])
def test_convolution_from_a_state_equals_the_loop(kind: str, length: int, packed: bool, padded: bool) -> None:
    model, u, state = system(kind, D, N), random(B, length, D), random(B, D, N, seed=1)
    draw = torch.Generator().manual_seed(length)
    segments = (torch.rand(B, length, generator=draw) < 0.3).cumsum(1) if packed else None
    valid = torch.rand(B, length, generator=draw) > 0.4 if padded else None
    found, expected = state_space(model, u, state, segments, valid), loop(model, u, state, segments, valid)
    is_valid = torch.ones(B, length, dtype=torch.bool) if valid is None else valid
    assert (found[0] - expected[0])[is_valid].abs().sum() < 1e-10
    assert (found[1] - expected[1]).abs().max() < 1e-12
    assert found[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_document_among_short_ones_is_split_into_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk continues the state of the previous one; the result does not depend on the number of chunks."""
    model, u = system(kind, D, N), random(1, 90, D)
    segments = torch.cat([torch.arange(20), torch.full((60,), 20), torch.arange(21, 31)])[None]
    state = random(1, D, N, seed=1)
    chunks = document_chunks.chunk_documents((1, 90), segments, None)
    assert chunks.chained and len(chunks.lengths) * chunks.padded_length < 31 * 60 / 2
    expected, expected_state = loop(model, u, state, segments)
    for max_chunks in (2, 5, 256):
        monkeypatch.setattr(document_chunks, "MAX_CHUNKS", max_chunks)
        y, last_state = state_space(model, u, state, segments)
        assert (y - expected).abs().max() < 1e-12
        assert (last_state - expected_state).abs().max() < 1e-12
        assert (state_space(model, u, None, segments)[0] - loop(model, u, 0 * state, segments)[0]).abs().max() < 1e-12


def test_without_valid_tokens_the_state_is_unchanged() -> None:
    model, u, state = system("s4d", D, N), random(B, 4, D), random(B, D, N, seed=1)
    y, last_state = state_space(model, u, state, valid=torch.zeros(B, 4, dtype=torch.bool))
    assert not y.any()
    assert torch.equal(last_state, state)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0]])
    valid = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    model = system(kind, D, N)

    def run(u: Tensor, state: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        perturbed = System(model.transition, b, c)
        return *state_space(perturbed, u, state), *state_space(perturbed, u, state, segments, valid)  # type: ignore

    inputs = [t.requires_grad_() for t in (random(B, 7, D), random(B, D, N), model.b.clone(), model.c.clone())]
    assert gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 13, 64, 100])
def test_flops_equal_the_counted_products(kind: str, length: int) -> None:
    with FlopCounterMode(display=False) as counter:
        kernel(system(kind, D, N), length, torch.float64)
    assert flops(D, N, length, dense=kind == "s4") == counter.get_total_flops()


def test_autocast_does_not_change_the_result() -> None:
    model, u = system("s4", D, N), random(B, 50, D).float()
    expected = state_space(model, u)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(state_space(model, u)[0], expected)
