"""The errors of the scan kernels against float64, compared with those of the torch implementation in the same dtype.

Run by `python -m benchmarks.gpu.scans check`: all outputs and gradients of random cases, six runs of each kernel.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.gpu.scan_inputs import DEVICE, draw, refuse_triton
from regard.kernels.recurrent import wkv as wkv_module
from regard.kernels.recurrent.linear_scan import ScanInputs
from regard.kernels.recurrent.linear_scan import chunked as scan_chunked
from regard.kernels.recurrent.linear_scan.triton import autograd as triton_scan
from regard.kernels.recurrent.selective_scan import SelectiveScanInputs
from regard.kernels.recurrent.selective_scan import chunked as selective_chunked
from regard.kernels.recurrent.selective_scan.triton import autograd as triton_selective_scan
from regard.kernels.recurrent.wkv import Sums, WKVInputs, wkv


def random_masks(B: int, L: int, packed: bool) -> tuple[Tensor | None, Tensor | None]:
    """Segments and valid tokens."""
    if not packed:
        return None, None
    return (torch.rand(B, L, device=DEVICE) < 0.02).cumsum(1), torch.rand(B, L, device=DEVICE) < 0.9


def scan_cases() -> Iterator[tuple[str, ScanInputs]]:
    for name, (B, H, G, L, N, P), decay_kind, packed in (
        ("linear", (2, 4, 4, 1000, 128, 128), "none", False),
        ("linear, z", (2, 4, 4, 1000, 128, 129), "none", False),
        ("linear packed, z", (2, 3, 3, 777, 64, 65), "none", True),
        ("retention", (2, 4, 4, 1000, 64, 128), "head", False),
        ("mamba-2", (2, 8, 2, 1000, 128, 64), "token", False),
        ("mamba-2 packed", (2, 8, 1, 333, 128, 64), "token", True),
        ("wide", (1, 2, 1, 600, 256, 64), "token", False),
    ):
        q, k, v = (torch.randn(B, h, L, e, device=DEVICE) / e**0.5 for h, e in ((G, N), (G, N), (H, P)))
        log_decays = {"head": -torch.rand(H, device=DEVICE), "token": -torch.rand(B, H, L, device=DEVICE)}
        state = torch.randn(B, H, N, P, device=DEVICE)
        yield name, ScanInputs(q, k, v, log_decays.get(decay_kind), state, *random_masks(B, L, packed))


def selective_cases() -> Iterator[tuple[str, SelectiveScanInputs]]:
    for name, (B, L, F, N), packed, biased in (
        ("mamba", (2, 700, 256, 16), False, True),
        ("mamba packed", (2, 333, 100, 16), True, True),
        ("mamba small", (1, 100, 48, 8), True, False),
        ("mamba wide", (1, 500, 64, 64), False, False),
    ):
        u, b, c = draw(B, L, F, dtype=torch.float32), *(draw(B, L, N, dtype=torch.float32) for _ in range(2))
        delta, A = torch.randn(B, L, F, device=DEVICE), -torch.rand(F, N, device=DEVICE) * N
        bias = torch.randn(F, device=DEVICE) - 3 if biased else None
        delta = delta if biased else softplus(delta - 2)
        D, state = torch.randn(F, device=DEVICE), torch.randn(B, F, N, device=DEVICE)
        yield name, SelectiveScanInputs(u, delta, A, b, c, D, state, *random_masks(B, L, packed), bias)


def wkv_cases() -> Iterator[tuple[str, WKVInputs]]:
    for name, (B, L, F), packed in (("wkv", (2, 500, 64), False), ("wkv packed", (2, 333, 40), True)):
        k, v = 3 * draw(B, L, F, dtype=torch.float32), draw(B, L, F, dtype=torch.float32)
        log_decay, bonus = -torch.rand(F, device=DEVICE) * 2, torch.randn(F, device=DEVICE)
        state = Sums(*(torch.randn(B, F, device=DEVICE) + shift for shift in (0, 5, 0)))
        yield name, WKVInputs(k, v, log_decay, bonus, state, *random_masks(B, L, packed))


def wkv_sums(inputs: WKVInputs) -> tuple[Tensor, Tensor, Tensor]:
    """`wkv` that returns the sums themselves: the two implementations may scale them by different peaks."""
    out, last = wkv(inputs)
    return out, last.value * last.peak.exp(), last.weight * last.peak.exp()


class ScanCheck(NamedTuple):
    cases: Callable[[], Iterator[tuple[str, NamedTuple]]]
    cast_fields: tuple[str, ...]  # inputs that are cast to the dtype that is checked; the others stay in float32
    kernel: Callable
    torch_scan: Callable


CHECKS = {
    "scan": ScanCheck(scan_cases, ("q", "k", "v"), triton_scan.scan, scan_chunked.scan),
    "selective": ScanCheck(
        selective_cases,
        ("u", "delta", "B", "C"),
        triton_selective_scan.selective_scan,
        selective_chunked.selective_scan,
    ),
    "wkv": ScanCheck(
        wkv_cases, ("k", "v"), wkv_sums, patch.object(wkv_module, "cannot_run_triton", refuse_triton)(wkv_sums)
    ),
}


def to_float64(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


def with_gradients(x: Tensor | None) -> Tensor | None:
    return x.detach().requires_grad_() if x is not None and x.is_floating_point() else x


def results(scan: Callable, inputs: NamedTuple) -> list[Tensor]:
    """Outputs, and the gradients of all inputs for random gradients of the outputs."""
    inputs = tree_map(with_gradients, inputs)
    outs = scan(inputs)
    rng = torch.Generator(DEVICE).manual_seed(0)
    # Rounded to bfloat16, so that they are equal in all dtypes.
    grads = [torch.randn(x.shape, generator=rng, device=DEVICE).bfloat16().to(x.dtype) for x in outs]
    leaves = [x for x in tree_leaves(inputs) if x is not None and x.requires_grad]
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


def error(found: Tensor, exact: Tensor) -> float:
    """‖found - exact‖ / ‖exact‖"""
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check_one(trial: tuple[str, str, torch.dtype]) -> str:
    kind, name, dtype = trial
    torch.manual_seed(0)
    check = CHECKS[kind]
    inputs = next(inputs for case, inputs in check.cases() if case == name)
    inputs = inputs._replace(**{field: getattr(inputs, field).to(dtype) for field in check.cast_fields})
    exact = results(check.torch_scan, tree_map(to_float64, inputs))
    first = results(check.kernel, inputs)
    others = [results(check.kernel, inputs) for _ in range(5)]
    equal = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    outputs = first, results(check.torch_scan, inputs)
    errors = [[error(x, e) for x, e in zip(found, exact, strict=True)] for found in outputs]
    cells = "  ".join(f"{kernel:.1e}|{torch_error:.1e}" for kernel, torch_error in zip(*errors, strict=True))
    return f"  {name:16} {str(dtype)[6:]:9} six runs {'equal' if equal else 'DIFFER'}  {cells}"


def check(pool: ProcessPoolExecutor) -> None:
    print("errors of each output and gradient against float64, ‖Δ‖/‖exact‖: kernel | torch in that dtype")
    dtypes = (torch.bfloat16, torch.float32)
    trials = [(kind, name, dtype) for dtype in dtypes for kind in CHECKS for name, _ in CHECKS[kind].cases()]
    for trial, result in [(trial, pool.submit(check_one, trial)) for trial in trials]:
        print(result.result() if result.exception() is None else f"  {trial}: {result.exception()!s:.200}", flush=True)
