"""Every backend of the selective scan equals a loop over tokens, channels and states."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.kernels.recurrent.linear_recurrence import compose
from regard.kernels.recurrent.selective_scan import (
    BACKENDS,
    SelectiveScanInputs,
    associative,
    backend,
    chunked,
    select_backend,
    selective_scan,
    sequential,
)

ROWS, F, N = 2, 3, 2
SCANS = {name: BACKENDS[name].selective_scan for name in ("sequential", "associative")} | {
    f"chunks of {size}": partial(chunked.selective_scan, chunk=size) for size in (1, 3, 4, 64)
}


def draw(length: int, dtype: torch.dtype = torch.float64, rows: int = ROWS, f: int = F, n: int = N) -> list[Tensor]:
    """u, Δ, A, B, C, D and the state."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    u, delta = normal(rows, length, f), normal(rows, length, f).exp()
    B, C = normal(rows, length, n), normal(rows, length, n)
    return [x.to(dtype) for x in (u, delta, -normal(f, n).exp(), B, C, normal(f), normal(rows, f, n))]


def loop(inputs: SelectiveScanInputs) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C, D, state, segments, valid, _ = inputs
    state, y = state.clone(), torch.zeros_like(u)
    for b in range(len(u)):
        for t in range(u.shape[1]):
            if segments is not None and t and segments[b, t] != segments[b, t - 1]:
                state[b] = 0
            for f in range(u.shape[2]):
                for n in range(A.shape[1]):
                    if valid is None or valid[b, t]:
                        state[b, f, n] *= torch.exp(delta[b, t, f] * A[f, n])
                        state[b, f, n] += delta[b, t, f] * B[b, t, n] * u[b, t, f]
                    y[b, t, f] += C[b, t, n] * state[b, f, n]
                y[b, t, f] += D[f] * u[b, t, f]
    return y, state


def documents(length: int) -> Tensor:
    """Document boundaries inside chunks, at their edges, and at consecutive tokens."""
    segments = torch.zeros(ROWS, length, dtype=torch.int64)
    for b, starts in enumerate([(1, 3, 4, 8), (6,)]):
        for start in starts:
            segments[b, start:] += 1
    return segments


def random_valid(length: int) -> Tensor:
    return torch.rand(ROWS, length, generator=torch.Generator().manual_seed(1)) > 0.3


@pytest.mark.ledger("mamba.scan")
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("length", [1, 2, 12, 13])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("padded", [False, True], ids=["valid", "padded"])
def test_all_backends_equal_the_loop(scan: str, length: int, packed: bool, padded: bool) -> None:
    segments, valid = documents(length) if packed else None, random_valid(length) if padded else None
    inputs = SelectiveScanInputs(*draw(length), segments, valid)
    for found, expected in zip(SCANS[scan](inputs), loop(inputs), strict=True):
        assert (found - expected).abs().max() < 1e-12


@pytest.mark.ledger("mamba.scan")
def test_composition_of_steps_is_associative() -> None:
    first, second, third = ((a, b) for a, b in torch.randn(3, 2, 5, dtype=torch.float64))
    for x, y in zip(compose(compose(first, second), third), compose(first, compose(second, third)), strict=True):
        assert (x - y).abs().max() < 1e-14
    assert not torch.allclose(compose(first, second)[1], compose(second, first)[1])  # but it is not commutative


@pytest.mark.ledger("mamba.scan")
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_split_equals_whole(scan: str, cut: int) -> None:
    u, delta, A, B, C, D, state = draw(12)

    def run(tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = SelectiveScanInputs(u[:, tokens], delta[:, tokens], A, B[:, tokens], C[:, tokens], D, state)
        return SCANS[scan](inputs)

    whole, whole_last_state = run(slice(None), state)
    first, state_at_cut = run(slice(cut), state)
    second, last_state = run(slice(cut, None), state_at_cut)
    assert (torch.cat([first, second], 1) - whole).abs().max() < 1e-12
    assert (last_state - whole_last_state).abs().max() < 1e-12


@pytest.mark.parametrize("scan", ["associative", "chunks of 3", "chunks of 64"])
def test_gradcheck(scan: str) -> None:
    tensors = [x.requires_grad_() for x in draw(8)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return SCANS[scan](SelectiveScanInputs(*tensors, documents(8), random_valid(8)))

    assert gradcheck(run, tensors, fast_mode=True)


def test_chunked_gradients_equal_sequential_gradients() -> None:
    tensors = [x.requires_grad_() for x in draw(13)]

    def gradients(scan: str) -> tuple[Tensor, ...]:
        y, last = SCANS[scan](SelectiveScanInputs(*tensors, documents(13), random_valid(13)))
        return torch.autograd.grad((y.sin().sum() + last.cos().sum()), tensors)

    for found, expected in zip(gradients("chunks of 4"), gradients("sequential"), strict=True):
        assert (found - expected).abs().max() < 1e-11


@pytest.mark.ledger("mamba.scan")
def test_tensors_saved_for_backward_do_not_grow_with_the_state_dim() -> None:
    """O(L · F): u, Δ, B, C and the states before each chunk, at most as large as u; `associative` saves L · F · N."""
    saved: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    length, n = 512, 16
    inputs = SelectiveScanInputs(*(x.requires_grad_() for x in draw(length, torch.float32, rows=1, f=256, n=n)))
    for module, limit in ((chunked, 5 * length * 256), (associative, None)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            module.selective_scan(inputs)
        assert sum(saved) < limit if limit else sum(saved) > 3 * length * 256 * n


@pytest.mark.parametrize("scan", SCANS)
def test_with_a_bias_delta_is_a_softplus(scan: str) -> None:
    u, delta, *other_inputs = draw(13)
    delta, bias = delta - 2, torch.linspace(-3, 1, F, dtype=torch.float64)
    softplus = (1 + (delta + bias).exp()).log()
    expected = loop(SelectiveScanInputs(u, softplus, *other_inputs, documents(13), random_valid(13)))
    found = SCANS[scan](SelectiveScanInputs(u, delta, *other_inputs, documents(13), random_valid(13), bias))
    assert all((f - e).abs().max() < 1e-9 for f, e in zip(found, expected, strict=True))


def test_float32_is_accurate_over_16k_tokens() -> None:
    """With slow and fast rates and steps from 0.001 to 0.1, as in a trained model."""
    u, delta, A, B, C, D, state = draw(16384, rows=1, f=8, n=4)
    delta = 1e-3 * 100 ** torch.rand(delta.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = [u, delta, A, B, C, D, torch.zeros_like(state)]
    expected, _ = selective_scan(SelectiveScanInputs(*case))
    found, _ = selective_scan(SelectiveScanInputs(*(x.float() for x in case)))
    assert (found - expected).abs().max() / expected.abs().max() < 1e-6
    assert found.isfinite().all()


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_and_output_stay_in_float32(scan: str, dtype: torch.dtype) -> None:
    *tensors, state = draw(5)
    y, last_state = SCANS[scan](SelectiveScanInputs(*(x.to(dtype) for x in tensors), state.float()))
    assert y.dtype == last_state.dtype == torch.float32


def test_autocast_does_not_change_the_result() -> None:
    inputs = SelectiveScanInputs(*draw(13, torch.float32), documents(13))
    expected = selective_scan(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = selective_scan(inputs)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_backends_are_chosen_by_rule_or_by_name() -> None:
    one_token, two_tokens, four_tokens = (SelectiveScanInputs(*draw(length)) for length in (1, 2, 4))
    assert select_backend(one_token) == ("sequential", "one token is one step")
    assert select_backend(two_tokens)[0] == "chunked"
    assert torch.equal(backend("sequential")(four_tokens)[0], sequential.selective_scan(four_tokens)[0])
    with pytest.raises(ValueError, match="did you mean 'chunked'"):
        backend("chunk")
