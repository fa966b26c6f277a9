"""Every form of the scan against the recurrence written out: any shape, decay, chunk, split, documents and padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from regard.kernels.recurrent.linear_scan import BACKENDS, backend, chunked, flops, scan, sequential, why
from tests.kernels.scans import KINDS, Case, cases, draw, loop


def error(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """The largest, relative to the largest number where that is above 1."""
    pairs = zip(found, expected, strict=True)
    return max(((f - e).abs().max() / e.abs().max().clamp_min(1)).item() for f, e in pairs)


@given(cases, st.sampled_from([1, 2, 5, 8, 64]))
def test_chunks_and_steps_are_the_recurrence(case: Case, chunk: int) -> None:
    expected = loop(case)
    assert error(sequential.scan(*case), expected) < 1e-12
    assert error(chunked.scan(*case, chunk=chunk), expected) < 1e-12
    assert error(scan(*case), expected) < 1e-12


@given(cases, st.sampled_from([3, 4, 64]))
def test_in_single_precision(case: Case, chunk: int) -> None:
    expected, case = loop(case), case.to(torch.float32)
    for found in (sequential.scan(*case), chunked.scan(*case, chunk=chunk)):
        assert found[0].dtype == found[1].dtype == torch.float32
        assert error(found, expected) < 5e-6


@given(cases, st.integers(0, 20), st.sampled_from(["chunked", "sequential"]))
def test_any_split_is_the_whole(case: Case, cut: int, form: str) -> None:
    length = case.v.shape[2]
    cut = cut % length
    if case.segments is not None and cut:
        case.segments[:, cut] = case.segments[:, cut - 1]  # what a state remembers is one document, which goes on
    whole, run = backend(form)(*case), backend(form)
    if cut == 0:
        return
    first, state = run(*case.tokens(0, cut))
    second, state = run(*case.tokens(cut, length)._replace(state=state))
    assert error((torch.cat([first, second], 2), state), whole) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_many_pieces_are_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(kind, length=45, packed=True, padded=True)
    whole = chunked.scan(*case, chunk=4)
    monkeypatch.setattr(chunked, "MAX_NUMBERS", 50)  # a few chunks at a time
    assert error(chunked.scan(*case, chunk=4), whole) < 1e-14


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [1, 2])
def test_gradients(kind: str, shared: int) -> None:
    q, k, v, decay, state, segments, valid = draw(kind, shared=shared, packed=True, padded=True)
    learned = [x.requires_grad_() for x in (q, k, v, state, *([] if decay is None else [decay]))]

    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return chunked.scan(q, k, v, decay, state, segments, valid, chunk=3)

    assert gradcheck(run, learned, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_fast_decays_stay_exact_and_finite(kind: str) -> None:
    """Sums of logarithms reach -6000 in a chunk; their differences must not lose what they are about."""
    case = draw(kind, length=130, strength=200.0, seed=4)
    exact, single = sequential.scan(*case), Case(*(x if x is None else x.float().requires_grad_() for x in case))
    found = chunked.scan(*single)
    assert error(found, exact) < 1e-6
    found[0].sum().backward()
    assert all(x.grad.isfinite().all() for x in single if x is not None)


def test_long_memories_stay_exact() -> None:
    case = draw("token", length=4096, strength=1e-4)
    assert error(chunked.scan(*case.to(torch.float32)), sequential.scan(*case)) < 1e-5


def test_autocast_changes_nothing() -> None:
    case = draw("token", length=70, packed=True).to(torch.float32)
    expected = scan(*case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scan(*case)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 5])
def test_the_state_stays_in_its_own_precision(dtype: torch.dtype, length: int) -> None:
    case = draw("channel", length=length)
    out, after = scan(*case.to(dtype)._replace(state=case.state.float()))
    assert out.dtype == after.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 17, 64, 130])
def test_flops_are_those_of_the_products(kind: str, length: int) -> None:
    case = draw(kind, 1, 2, 1 if kind == "channel" else 3, length)
    with FlopCounterMode(display=False) as counter:
        scan(*case)
    assert counter.get_total_flops() == flops(3, 2, length, case.v.shape[1], 2, kind == "channel")


@pytest.mark.parametrize("channels", [False, True])
def test_work_grows_with_the_length_alone(channels: bool) -> None:
    assert flops(64, 64, 16384, 4, channels=channels) == 16 * flops(64, 64, 1024, 4, channels=channels)


@pytest.mark.parametrize("kind", KINDS)
def test_what_backward_keeps_grows_with_the_length_alone(kind: str) -> None:
    """A slice of the whole in every step would be kept as long as the whole: n² numbers."""

    def kept(length: int) -> int:
        case, total = draw(kind, 1, 1, 1, length, 8, 8), 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            scan(*(x if x is None or not x.is_floating_point() else x.requires_grad_() for x in case))
        return total

    assert kept(2048) < 4.2 * kept(512)


def test_the_choice_is_told() -> None:
    case = draw("none", length=5)
    name, reason = why(*case)
    assert name in BACKENDS and name != "sequential"
    assert reason
    assert why(*draw("none", length=1)) == ("sequential", "one token is one step")


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no scan backend 'chunkd'; did you mean 'chunked'"):
        backend("chunkd")


@pytest.mark.parametrize("name", ["auto", "chunked", "sequential"])
def test_forms_by_name_agree(name: str) -> None:
    case = draw("constant", packed=True)
    assert error(backend(name)(*case), loop(case)) < 1e-13
