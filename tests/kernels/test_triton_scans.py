"""The scans' Triton kernels against their references: outputs, states and all gradients; texts of several spans."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.kernels.recurrent.linear_scan import backend, sequential, why
from regard.kernels.recurrent.linear_scan.triton import autograd as scan_spans
from regard.kernels.recurrent.linear_scan.triton import backend as scan_triton
from regard.kernels.recurrent.selective_scan import sequential as selective_sequential
from regard.kernels.recurrent.selective_scan.triton import autograd as selective_spans
from regard.kernels.recurrent.selective_scan.triton import backend as selective_triton
from regard.kernels.recurrent.selective_scan.triton import carry
from regard.kernels.recurrent.wkv import EMPTY, Sums
from regard.kernels.recurrent.wkv import wkv as plain_wkv
from regard.kernels.recurrent.wkv.triton import autograd as wkv_spans
from tests.kernels.interpreted import DEVICE
from tests.kernels.scans import draw

Tensors = list[Tensor | None]


def results(scan: Callable, case: Tensors, dtype: torch.dtype) -> list[Tensor]:
    """All outputs, and the gradients of all inputs for some of the outputs."""
    case = [x.to(DEVICE, dtype).requires_grad_() if x is not None and x.is_floating_point() else x for x in case]
    case = [x if x is None else x.to(DEVICE) for x in case]
    outs = scan(*case)
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outs]
    return [*outs, *torch.autograd.grad(outs, [x for x in case if x is not None and x.requires_grad], grads)]


def error(kernel: Callable, plain: Callable, case: Tensors) -> float:
    """Of the kernel in float32, against the plain form in float64."""
    pairs = zip(results(kernel, case, torch.float32), results(plain, case, torch.float64), strict=True)
    return max(((found - exact).abs().max() / exact.abs().max().clamp_min(1)).item() for found, exact in pairs)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that a test can afford."""
    monkeypatch.setattr(scan_spans, "span_length", lambda *sizes: 16)
    monkeypatch.setattr(scan_spans, "PROGRAMS", 1)  # heads of a group go together
    monkeypatch.setattr(scan_spans, "state_tile", lambda *sizes: (16, 16, 4))
    monkeypatch.setattr(scan_spans, "read_tile", lambda *sizes: (16, 4))
    monkeypatch.setattr(selective_spans, "BLOCK", 16)
    monkeypatch.setattr(wkv_spans, "BLOCK", 8)
    monkeypatch.setattr(wkv_spans, "T", 8)
    monkeypatch.setattr(wkv_spans, "SPAN", 16)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kind", "shared", "values", "length", "packed", "padded"),
    [
        ("none", 1, 16, 33, False, False),
        ("none", 1, 17, 20, True, True),
        ("constant", 1, 32, 40, False, False),
        ("token", 2, 16, 40, False, False),
        ("token", 2, 17, 50, True, True),
        ("constant", 2, 16, 16, False, True),
    ],
)
def test_the_scan(kind: str, shared: int, values: int, length: int, packed: bool, padded: bool) -> None:
    case = draw(kind, 1, 1, shared, length, 16, values, packed, padded)
    assert error(scan_triton.scan, sequential.scan, list(case)) < 5e-6


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("programs", [1, 12])  # all heads of a group together; in two parts, and their sums summed
def test_heads_of_a_group_go_together(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_spans, "PROGRAMS", programs)
    case = draw("token", 1, 2, 4, 40, 16, 16, True, True)
    assert error(scan_triton.scan, sequential.scan, list(case)) < 5e-6


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["scan", "selective scan"])
def test_they_can_be_checkpointed(kind: str) -> None:
    if kind == "scan":
        kernel, case = scan_triton.scan, list(draw("token", 1, 1, 1, 20, 16, 16))
    else:
        shapes = ((1, 9, 4), (1, 9, 4), (4, 2), (1, 9, 2), (1, 9, 2), (4,), (1, 4, 2))
        kernel, case = selective_triton.selective_scan, [torch.rand(shape) for shape in shapes]
    once = results(partial(checkpoint, kernel, use_reentrant=False), case, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(once, results(kernel, case, torch.float32), strict=True))


@pytest.mark.usefixtures("small")
def test_a_split_text_is_the_whole() -> None:
    case = draw("token", 1, 1, 1, 40, 16, 17).to(torch.float32)
    case = type(case)(*(x if x is None else x.to(DEVICE) for x in case))
    whole, last = scan_triton.scan(*case)
    first, state = scan_triton.scan(*case.tokens(0, 13))
    second, state = scan_triton.scan(*case.tokens(13, 40)._replace(state=state))
    assert (torch.cat([first, second], 2) - whole).abs().max() < 5e-6 * whole.abs().max()
    assert (state - last).abs().max() < 5e-6 * last.abs().max()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("length", "channels", "packed"), [(19, 16, False), (34, 10, True)])
def test_mambas_scan(length: int, channels: int, packed: bool, biased: bool) -> None:
    case: Tensors = [torch.randn(1, length, channels), torch.rand(1, length, channels), -3 * torch.rand(channels, 2)]
    case += [torch.randn(1, length, 2), torch.randn(1, length, 2), torch.randn(channels), torch.randn(1, channels, 2)]
    case += [(torch.rand(1, length) < 0.15).cumsum(1), torch.rand(1, length) < 0.7] if packed else [None, None]
    if packed:
        case[5] = None
    if biased:  # Δ = softplus of any numbers, small steps too
        case[1] = 4 * torch.randn(1, length, channels)
        case += [torch.randn(channels) - 4]
    assert error(selective_triton.selective_scan, selective_sequential.selective_scan, case) < 5e-6


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("length", "packed"), [(5, False), (21, False), (48, False), (16, True), (71, True)])
def test_rwkvs_recurrence(length: int, packed: bool) -> None:
    case: Tensors = [3 * torch.randn(1, length, 5), torch.randn(1, length, 5), -torch.rand(5), torch.randn(5)]
    case += [torch.randn(1, 5), torch.rand(1, 5) + 0.5, torch.randn(1, 5)]
    if packed:
        case[4:7] = [torch.zeros(1, 5), torch.zeros(1, 5), torch.full((1, 5), EMPTY)]
    case += [(torch.rand(1, length) < 0.15).cumsum(1), torch.rand(1, length) < 0.7] if packed else [None, None]
    assert error(flat(wkv_spans.wkv), flat(plain_wkv), case) < 5e-6


def flat(wkv: Callable) -> Callable:
    """Sums as the numbers that they stand for: how they are split into a number and its exponent is free."""

    def run(k, v, decay, bonus, value, weight, peak, segments, valid) -> tuple[Tensor, ...]:
        out, last = wkv(k, v, decay, bonus, Sums(value, weight, peak), segments, valid)
        return out, last.value * last.peak.exp(), last.weight * last.peak.exp()

    return run


@pytest.mark.parametrize("reverse", [False, True])
def test_states_are_carried(reverse: bool) -> None:
    added, first = torch.randn(2, 11, 6, device=DEVICE), torch.randn(2, 6, device=DEVICE)
    faded, rate = -torch.rand(2, 11, 3, device=DEVICE), torch.rand(6, device=DEVICE)
    borders = carry.carry(added, faded, rate, first, reverse)
    state, expected = first, [first]
    for c in reversed(range(11)) if reverse else range(11):
        state = (faded[:, c].repeat(1, 2) * rate).exp() * state + added[:, c]
        expected.append(state)
    torch.testing.assert_close(borders, torch.stack(expected[::-1] if reverse else expected, 1))


def test_what_the_kernels_do_not_take_is_said() -> None:
    case = list(draw("token", keys=16, values=16))
    assert scan_triton.refuses(*case) == "triton needs a CUDA GPU, not cpu"
    with pytest.raises(ValueError, match="scan backend 'triton': triton needs a CUDA GPU, not cpu; choose another"):
        backend("triton")(*case)
    name, reason = why(*case)
    assert name == "chunked" and "triton needs a CUDA GPU" in reason


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "keys", "values", "expected"),
    [
        ("channel", 64, 64, "one decay per token"),
        ("none", 32, 64, "not 32 and 64"),
        ("none", 64, 66, "not 64 and 66"),
        ("none", 128, 129, None),
    ],
)
def test_cases_on_a_gpu(kind: str, keys: int, values: int, expected: str | None) -> None:
    case = [x if x is None else x.cuda() for x in draw(kind, keys=keys, values=values).to(torch.float32)]
    reason = scan_triton.refuses(*case)
    assert reason is None if expected is None else expected in str(reason)
    assert "float32" in str(scan_triton.refuses(*case[:4], case[4].double(), *case[5:]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "keys", "values", "length", "packed"),
    [("none", 128, 129, 1000, False), ("constant", 64, 128, 777, True), ("token", 128, 64, 3000, True)],
)
def test_long_texts_in_low_precision(
    kind: str, keys: int, values: int, length: int, packed: bool, dtype: torch.dtype
) -> None:
    case = draw(kind, 2, 2, 2, length, keys, values, packed, packed)
    q, k, v = (x.to("cuda", dtype) / x.shape[-1] ** 0.5 for x in case[:3])
    rest = [x if x is None else x.cuda() for x in case[3:]]
    exact, last = backend("chunked")(q.double(), k.double(), v.double(), *rest)
    found, state = scan_triton.scan(
        q, k, v, *[x.float() if x is not None and x.is_floating_point() else x for x in rest]
    )
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (found.double() - exact).norm() < limit * exact.norm()
    assert (state.double() - last).norm() < limit * last.norm()
