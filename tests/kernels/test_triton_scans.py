"""The Triton kernels of the scans equal their references: outputs, states and all gradients, over several spans."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from regard.kernels.recurrent.linear_scan import ScanInputs, backend, select_backend, sequential
from regard.kernels.recurrent.linear_scan import triton as linear_scan_triton
from regard.kernels.recurrent.linear_scan.triton import autograd as linear_scan_autograd
from regard.kernels.recurrent.selective_scan import SelectiveScanInputs
from regard.kernels.recurrent.selective_scan import sequential as selective_scan_sequential
from regard.kernels.recurrent.selective_scan import triton as selective_scan_triton
from regard.kernels.recurrent.selective_scan.triton import autograd as selective_scan_autograd
from regard.kernels.recurrent.selective_scan.triton import carry
from regard.kernels.recurrent.wkv import EMPTY, Sums, WKVInputs
from regard.kernels.recurrent.wkv import wkv as torch_wkv
from regard.kernels.recurrent.wkv.triton import autograd as wkv_autograd
from tests.kernels.scans import cast, draw, select_tokens
from tests.kernels.triton_device import DEVICE

Inputs = ScanInputs | SelectiveScanInputs | WKVInputs


def results(scan: Callable, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """All outputs, and the gradients of all inputs for random gradients of the outputs."""

    def prepare(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x if x is None else x.to(DEVICE)
        return x.to(DEVICE, dtype).requires_grad_()

    inputs = tree_map(prepare, inputs)
    outs = scan(inputs)
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outs]
    leaves = [x for x in tree_leaves(inputs) if x is not None and x.requires_grad]
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


def error(kernel: Callable, reference: Callable, inputs: Inputs) -> float:
    """The largest error of the kernel in float32 against the reference in float64."""
    pairs = zip(results(kernel, inputs, torch.float32), results(reference, inputs, torch.float64), strict=True)
    return max(((found - expected).abs().max() / expected.abs().max().clamp_min(1)).item() for found, expected in pairs)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that short sequences have several tiles."""
    monkeypatch.setattr(linear_scan_autograd, "span_length", lambda *sizes: 16)
    monkeypatch.setattr(linear_scan_autograd, "PROGRAMS", 1)  # one program handles all heads of a group
    monkeypatch.setattr(linear_scan_autograd, "state_tile", lambda *sizes: (16, 16, 4))
    monkeypatch.setattr(linear_scan_autograd, "read_tile", lambda *sizes: (16, 4))
    monkeypatch.setattr(selective_scan_autograd, "BLOCK", 16)
    monkeypatch.setattr(wkv_autograd, "BLOCK", 8)
    monkeypatch.setattr(wkv_autograd, "T", 8)
    monkeypatch.setattr(wkv_autograd, "SPAN", 16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("decay_kind", "heads_per_key", "value_dim", "length", "packed", "padded"),
    [
        ("none", 1, 16, 33, False, False),
        ("none", 1, 17, 20, True, True),
        ("constant", 1, 32, 40, False, False),
        ("token", 2, 16, 40, False, False),
        ("token", 2, 17, 50, True, True),
        ("constant", 2, 16, 16, False, True),
    ],
)
def test_linear_scan_equals_sequential(
    decay_kind: str, heads_per_key: int, value_dim: int, length: int, packed: bool, padded: bool
) -> None:
    inputs = draw(decay_kind, 1, 1, heads_per_key, length, 16, value_dim, packed, padded)
    assert error(linear_scan_triton.scan, sequential.scan, inputs) < 5e-6


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("programs", [1, 12])
def test_heads_of_a_group_may_be_split_over_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all heads of a group, or two programs whose results are summed."""
    monkeypatch.setattr(linear_scan_autograd, "PROGRAMS", programs)
    inputs = draw("token", 1, 2, 4, 40, 16, 16, True, True)
    assert error(linear_scan_triton.scan, sequential.scan, inputs) < 5e-6


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", ["scan", "selective scan"])
def test_activation_checkpointing_does_not_change_the_result(kind: str) -> None:
    if kind == "scan":
        kernel, inputs = linear_scan_triton.scan, draw("token", 1, 1, 1, 20, 16, 16)
    else:
        shapes = ((1, 9, 4), (1, 9, 4), (4, 2), (1, 9, 2), (1, 9, 2), (4,), (1, 4, 2))
        kernel = selective_scan_triton.selective_scan
        inputs = SelectiveScanInputs(*(torch.rand(shape) for shape in shapes))
    checkpointed = results(partial(checkpoint, kernel, use_reentrant=False), inputs, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(checkpointed, results(kernel, inputs, torch.float32), strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_split_equals_whole() -> None:
    inputs = cast(draw("token", 1, 1, 1, 40, 16, 17), torch.float32)
    inputs = ScanInputs(*(x if x is None else x.to(DEVICE) for x in inputs))
    whole, last = linear_scan_triton.scan(inputs)
    first, state = linear_scan_triton.scan(select_tokens(inputs, 0, 13))
    second, state = linear_scan_triton.scan(select_tokens(inputs, 13, 40)._replace(state=state))
    assert (torch.cat([first, second], 2) - whole).abs().max() < 5e-6 * whole.abs().max()
    assert (state - last).abs().max() < 5e-6 * last.abs().max()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("length", "channels", "packed"), [(19, 16, False), (34, 10, True)])
def test_selective_scan_equals_sequential(length: int, channels: int, packed: bool, biased: bool) -> None:
    u, delta, A = torch.randn(1, length, channels), torch.rand(1, length, channels), -3 * torch.rand(channels, 2)
    B, C, D = torch.randn(1, length, 2), torch.randn(1, length, 2), torch.randn(channels)
    state, segments, valid, bias = torch.randn(1, channels, 2), None, None, None
    if packed:
        D, segments, valid = None, (torch.rand(1, length) < 0.15).cumsum(1), torch.rand(1, length) < 0.7
    if biased:  # Δ is the softplus of positive and negative values
        delta, bias = 4 * torch.randn(1, length, channels), torch.randn(channels) - 4
    inputs = SelectiveScanInputs(u, delta, A, B, C, D, state, segments, valid, bias)
    assert error(selective_scan_triton.selective_scan, selective_scan_sequential.selective_scan, inputs) < 5e-6


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("length", "packed"), [(5, False), (21, False), (48, False), (16, True), (71, True)])
def test_wkv_equals_the_torch_form(length: int, packed: bool) -> None:
    k, v, log_decay, bonus = 3 * torch.randn(1, length, 5), torch.randn(1, length, 5), -torch.rand(5), torch.randn(5)
    state = Sums(torch.randn(1, 5), torch.rand(1, 5) + 0.5, torch.randn(1, 5))
    segments = valid = None
    if packed:
        state = Sums(torch.zeros(1, 5), torch.zeros(1, 5), torch.full((1, 5), EMPTY))
        segments, valid = (torch.rand(1, length) < 0.15).cumsum(1), torch.rand(1, length) < 0.7
    inputs = WKVInputs(k, v, log_decay, bonus, state, segments, valid)
    assert error(with_unscaled_sums(wkv_autograd.wkv), with_unscaled_sums(torch_wkv), inputs) < 5e-6


def with_unscaled_sums(wkv: Callable) -> Callable:
    """`wkv` that returns unscaled sums: backends may scale them by different peaks."""

    def run(inputs: WKVInputs) -> tuple[Tensor, ...]:
        out, last = wkv(inputs)
        return out, last.value * last.peak.exp(), last.weight * last.peak.exp()

    return run


@pytest.mark.parametrize("reverse", [False, True])
def test_carry_equals_the_loop(reverse: bool) -> None:
    added, initial = torch.randn(2, 11, 6, device=DEVICE), torch.randn(2, 6, device=DEVICE)
    elapsed, rate = -torch.rand(2, 11, 3, device=DEVICE), torch.rand(6, device=DEVICE)
    borders = carry.carry(added, elapsed, rate, initial, reverse)
    state, expected = initial, [initial]
    for c in reversed(range(11)) if reverse else range(11):
        state = (elapsed[:, c].repeat(1, 2) * rate).exp() * state + added[:, c]
        expected.append(state)
    torch.testing.assert_close(borders, torch.stack(expected[::-1] if reverse else expected, 1))


def test_unsupported_devices_are_refused_with_the_reason() -> None:
    inputs = draw("token", key_dim=16, value_dim=16)
    assert linear_scan_triton.unsupported_reason(inputs) == "triton needs a CUDA GPU, not cpu"
    with pytest.raises(ValueError, match="scan backend 'triton': triton needs a CUDA GPU, not cpu; choose another"):
        backend("triton")(inputs)
    name, reason = select_backend(inputs)
    assert name == "chunked" and "triton needs a CUDA GPU" in reason


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("decay_kind", "key_dim", "value_dim", "expected"),
    [
        ("channel", 64, 64, "one decay per token"),
        ("none", 32, 64, "not 32 and 64"),
        ("none", 64, 66, "not 64 and 66"),
        ("none", 128, 129, None),
    ],
)
def test_unsupported_inputs_are_refused_on_a_gpu(
    decay_kind: str, key_dim: int, value_dim: int, expected: str | None
) -> None:
    inputs = cast(draw(decay_kind, key_dim=key_dim, value_dim=value_dim), torch.float32)
    inputs = ScanInputs(*(x if x is None else x.cuda() for x in inputs))
    reason = linear_scan_triton.unsupported_reason(inputs)
    assert reason is None if expected is None else expected in str(reason)
    assert "float32" in str(linear_scan_triton.unsupported_reason(inputs._replace(state=inputs.state.double())))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("decay_kind", "key_dim", "value_dim", "length", "packed"),
    [("none", 128, 129, 1000, False), ("constant", 64, 128, 777, True), ("token", 128, 64, 3000, True)],
)
def test_long_sequences_are_accurate_in_every_dtype(
    decay_kind: str, key_dim: int, value_dim: int, length: int, packed: bool, dtype: torch.dtype
) -> None:
    case = draw(decay_kind, 2, 2, 2, length, key_dim, value_dim, packed, packed)
    q, k, v = (x.to("cuda", dtype) / x.shape[-1] ** 0.5 for x in case[:3])
    other_inputs = [x if x is None else x.cuda() for x in case[3:]]
    exact, last = backend("chunked")(ScanInputs(q.double(), k.double(), v.double(), *other_inputs))
    other_inputs = [x.float() if x is not None and x.is_floating_point() else x for x in other_inputs]
    found, state = linear_scan_triton.scan(ScanInputs(q, k, v, *other_inputs))
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (found.double() - exact).norm() < limit * exact.norm()
    assert (state.double() - last).norm() < limit * last.norm()
