"""Every backend of the linear scan equals a loop: any shape, decay, chunk and split, with documents and padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from regard.kernels.recurrent.linear_scan import (
    BACKENDS,
    ScanInputs,
    backend,
    chunked,
    flops,
    scan,
    select_backend,
    sequential,
)
from tests.kernels.scans import DECAY_KINDS, cast, draw, loop, random_inputs, select_tokens


def error(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """The largest error of the outputs and the state, each relative to its largest element if that is above 1."""
    pairs = zip(found, expected, strict=True)
    return max(((f - e).abs().max() / e.abs().max().clamp_min(1)).item() for f, e in pairs)


@given(random_inputs, st.sampled_from([1, 2, 5, 8, 64]))
def test_all_backends_equal_the_loop(inputs: ScanInputs, chunk: int) -> None:
    expected = loop(inputs)
    assert error(sequential.scan(inputs), expected) < 1e-12
    assert error(chunked.scan(inputs, chunk=chunk), expected) < 1e-12
    assert error(scan(inputs), expected) < 1e-12


@given(random_inputs, st.sampled_from([3, 4, 64]))
def test_float32_is_accurate(inputs: ScanInputs, chunk: int) -> None:
    expected, inputs = loop(inputs), cast(inputs, torch.float32)
    for found in (sequential.scan(inputs), chunked.scan(inputs, chunk=chunk)):
        assert found[0].dtype == found[1].dtype == torch.float32
        assert error(found, expected) < 5e-6


@given(random_inputs, st.integers(0, 20), st.sampled_from(["chunked", "sequential"]))
def test_split_equals_whole(inputs: ScanInputs, cut: int, name: str) -> None:
    length = inputs.v.shape[2]
    cut = cut % length
    if inputs.segments is not None and cut:
        inputs.segments[:, cut] = inputs.segments[:, cut - 1]  # the second call continues the document of its state
    run = backend(name)
    whole = run(inputs)
    if cut == 0:
        return
    first, state = run(select_tokens(inputs, 0, cut))
    second, state = run(select_tokens(inputs, cut, length)._replace(state=state))
    assert error((torch.cat([first, second], 2), state), whole) < 1e-12


@pytest.mark.parametrize("decay_kind", DECAY_KINDS)
def test_portions_of_chunks_equal_all_chunks_at_once(decay_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(decay_kind, length=45, packed=True, padded=True)
    whole = chunked.scan(inputs, chunk=4)
    monkeypatch.setattr(chunked, "MAX_NUMBERS", 50)  # so that a portion is a few chunks
    assert error(chunked.scan(inputs, chunk=4), whole) < 1e-14


@pytest.mark.parametrize("decay_kind", DECAY_KINDS)
@pytest.mark.parametrize("heads_per_key", [1, 2])
def test_gradcheck(decay_kind: str, heads_per_key: int) -> None:
    q, k, v, log_decay, state, segments, valid = draw(decay_kind, heads_per_key=heads_per_key, packed=True, padded=True)
    leaves = [x.requires_grad_() for x in (q, k, v, state, *([] if log_decay is None else [log_decay]))]

    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return chunked.scan(ScanInputs(q, k, v, log_decay, state, segments, valid), chunk=3)

    assert gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("decay_kind", DECAY_KINDS[1:])
def test_strong_decays_are_accurate_with_finite_gradients(decay_kind: str) -> None:
    """Sums of log decays reach -6000 in a chunk; the differences of such sums must stay accurate."""
    inputs = draw(decay_kind, length=130, decay_scale=200.0, seed=4)
    expected = sequential.scan(inputs)
    in_float32 = ScanInputs(*(x if x is None else x.float().requires_grad_() for x in inputs))
    found = chunked.scan(in_float32)
    assert error(found, expected) < 1e-6
    found[0].sum().backward()
    assert all(x.grad.isfinite().all() for x in in_float32 if x is not None)


def test_weak_decays_are_accurate_over_4096_tokens() -> None:
    inputs = draw("token", length=4096, decay_scale=1e-4)
    assert error(chunked.scan(cast(inputs, torch.float32)), sequential.scan(inputs)) < 1e-5


def test_autocast_does_not_change_the_result() -> None:
    inputs = cast(draw("token", length=70, packed=True), torch.float32)
    expected = scan(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scan(inputs)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 5])
def test_state_and_output_stay_in_float32(dtype: torch.dtype, length: int) -> None:
    inputs = draw("channel", length=length)
    out, last_state = scan(cast(inputs, dtype)._replace(state=inputs.state.float()))
    assert out.dtype == last_state.dtype == torch.float32


@pytest.mark.parametrize("decay_kind", DECAY_KINDS)
@pytest.mark.parametrize("length", [1, 17, 64, 130])
def test_flops_equal_the_counted_matrix_products(decay_kind: str, length: int) -> None:
    inputs = draw(decay_kind, 1, 2, 1 if decay_kind == "channel" else 3, length)
    with FlopCounterMode(display=False) as counter:
        scan(inputs)
    assert counter.get_total_flops() == flops(3, 2, length, inputs.v.shape[1], 2, decay_kind == "channel")


@pytest.mark.parametrize("channels", [False, True])
def test_flops_are_linear_in_the_length(channels: bool) -> None:
    assert flops(64, 64, 16384, 4, channels=channels) == 16 * flops(64, 64, 1024, 4, channels=channels)


@pytest.mark.parametrize("decay_kind", DECAY_KINDS)
def test_tensors_saved_for_backward_are_linear_in_the_length(decay_kind: str) -> None:
    """The gradient of a slice is as large as the sliced tensor: one slice per step would cost n² elements."""

    def saved_elements(length: int) -> int:
        inputs, total = draw(decay_kind, 1, 1, 1, length, 8, 8), 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            scan(ScanInputs(*(x if x is None or not x.is_floating_point() else x.requires_grad_() for x in inputs)))
        return total

    assert saved_elements(2048) < 4.2 * saved_elements(512)


def test_select_backend_returns_a_name_and_a_reason() -> None:
    inputs = draw("none", length=5)
    name, reason = select_backend(inputs)
    assert name in BACKENDS and name != "sequential"
    assert reason
    assert select_backend(draw("none", length=1)) == ("sequential", "one token is one step")


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no scan backend 'chunkd'; did you mean 'chunked'"):
        backend("chunkd")


@pytest.mark.parametrize("name", ["auto", "chunked", "sequential"])
def test_backends_by_name_equal_the_loop(name: str) -> None:
    inputs = draw("constant", packed=True)
    assert error(backend(name)(inputs), loop(inputs)) < 1e-13
