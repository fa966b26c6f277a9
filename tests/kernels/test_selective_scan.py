"""Mamba's scan by every backend against the recurrence written out, one token and one number at a time."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.kernels.recurrent.selective_scan import (
    BACKENDS,
    associative,
    backend,
    chunked,
    selective_scan,
    sequential,
    why,
)
from regard.kernels.recurrent.selective_scan.associative import compose

ROWS, F, N = 2, 3, 2
FORMS = {name: BACKENDS[name].selective_scan for name in ("sequential", "associative")} | {
    f"chunks of {size}": partial(chunked.selective_scan, chunk=size) for size in (1, 3, 4, 64)
}


def inputs(length: int, dtype: torch.dtype = torch.float64, rows: int = ROWS, f: int = F, n: int = N) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    u, delta, B, C = draw(rows, length, f), draw(rows, length, f).exp(), draw(rows, length, n), draw(rows, length, n)
    return [x.to(dtype) for x in (u, delta, -draw(f, n).exp(), B, C, draw(f), draw(rows, f, n))]


def recurrence(u, delta, A, B, C, D, state, segments=None, valid=None) -> tuple[Tensor, Tensor]:
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
    """Borders inside chunks, at their edges, side by side."""
    borders = torch.zeros(ROWS, length, dtype=torch.int64)
    for b, places in enumerate([(1, 3, 4, 8), (6,)]):
        for place in places:
            borders[b, place:] += 1
    return borders


def holes(length: int) -> Tensor:
    return torch.rand(ROWS, length, generator=torch.Generator().manual_seed(1)) > 0.3


@pytest.mark.ledger("mamba.scan")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 12, 13])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("padded", [False, True], ids=["valid", "padded"])
def test_every_form_is_the_recurrence(form: str, length: int, packed: bool, padded: bool) -> None:
    segments, valid = documents(length) if packed else None, holes(length) if padded else None
    found = FORMS[form](*inputs(length), segments, valid)
    for one, other in zip(found, recurrence(*inputs(length), segments, valid), strict=True):
        assert (one - other).abs().max() < 1e-12


@pytest.mark.ledger("mamba.scan")
def test_joining_steps_is_associative() -> None:
    one, two, three = ((a, b) for a, b in torch.randn(3, 2, 5, dtype=torch.float64))
    for x, y in zip(compose(compose(one, two), three), compose(one, compose(two, three)), strict=True):
        assert (x - y).abs().max() < 1e-14
    assert not torch.allclose(compose(one, two)[1], compose(two, one)[1])  # but the order matters


@pytest.mark.ledger("mamba.scan")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_any_split_is_the_whole(form: str, cut: int) -> None:
    u, delta, A, B, C, D, state = inputs(12)
    whole, last = FORMS[form](u, delta, A, B, C, D, state)
    first, middle = FORMS[form](u[:, :cut], delta[:, :cut], A, B[:, :cut], C[:, :cut], D, state)
    second, end = FORMS[form](u[:, cut:], delta[:, cut:], A, B[:, cut:], C[:, cut:], D, middle)
    assert (torch.cat([first, second], 1) - whole).abs().max() < 1e-12
    assert (end - last).abs().max() < 1e-12


@pytest.mark.parametrize("form", ["associative", "chunks of 3", "chunks of 64"])
def test_gradients(form: str) -> None:
    tensors = [x.requires_grad_() for x in inputs(8)]
    assert gradcheck(lambda *x: FORMS[form](*x, documents(8), holes(8)), tensors, fast_mode=True)


def test_gradients_are_those_of_the_loop() -> None:
    tensors = [x.requires_grad_() for x in inputs(13)]

    def gradients(form: str) -> tuple[Tensor, ...]:
        y, last = FORMS[form](*tensors, documents(13), holes(13))
        return torch.autograd.grad((y.sin().sum() + last.cos().sum()), tensors)

    for found, expected in zip(gradients("chunks of 4"), gradients("sequential"), strict=True):
        assert (found - expected).abs().max() < 1e-11


@pytest.mark.ledger("mamba.scan")
def test_what_training_keeps_does_not_grow_with_the_number_of_states() -> None:
    """O(L · F): u, Δ, B, C and the states before each chunk, which are no more than u; the tree keeps L · F · N."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    length, n = 512, 16
    tensors = [x.requires_grad_() for x in inputs(length, torch.float32, rows=1, f=256, n=n)]
    for form, most in ((chunked, 5 * length * 256), (associative, None)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            form.selective_scan(*tensors)
        assert sum(kept) < most if most else sum(kept) > 3 * length * 256 * n


@pytest.mark.parametrize("form", FORMS)
def test_with_a_bias_the_steps_are_its_softplus(form: str) -> None:
    u, delta, A, B, C, D, state = inputs(13)
    given, bias = delta - 2, torch.linspace(-3, 1, F, dtype=torch.float64)
    steps = (1 + (given + bias).exp()).log()
    expected = recurrence(u, steps, A, B, C, D, state, documents(13), holes(13))
    found = FORMS[form](u, given, A, B, C, D, state, documents(13), holes(13), bias)
    assert all((f - e).abs().max() < 1e-9 for f, e in zip(found, expected, strict=True))


def test_steady_in_float32_over_16k_tokens() -> None:
    """As in a trained model: slow and fast rates, steps from 0.001 to 0.1."""
    u, delta, A, B, C, D, state = inputs(16384, rows=1, f=8, n=4)
    delta = 1e-3 * 100 ** torch.rand(delta.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = [u, delta, A, B, C, D, torch.zeros_like(state)]
    expected, _ = selective_scan(*case)
    found, _ = selective_scan(*(x.float() for x in case))
    assert (found - expected).abs().max() / expected.abs().max() < 1e-6
    assert found.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_state_stays_in_its_own_precision(form: str, dtype: torch.dtype) -> None:
    *tokens, state = inputs(5)
    y, after = FORMS[form](*(x.to(dtype) for x in tokens), state.float())
    assert y.dtype == after.dtype == torch.float32


def test_autocast_changes_nothing() -> None:
    tensors = inputs(13, torch.float32)
    expected = selective_scan(*tensors, documents(13))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = selective_scan(*tensors, documents(13))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_the_table_says_what_it_takes() -> None:
    assert why(*inputs(1)) == ("sequential", "one token is one step")
    assert why(*inputs(2))[0] == "chunked"
    assert torch.equal(backend("sequential")(*inputs(4))[0], sequential.selective_scan(*inputs(4))[0])
    with pytest.raises(ValueError, match="did you mean 'chunked'"):
        backend("chunk")
