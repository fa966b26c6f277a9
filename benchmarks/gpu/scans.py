"""Scans on a GPU compared with full attention: `python -m benchmarks.gpu.scans [check] [time] [layers] [sweep]`.

Without arguments all four run. `time` measures whole scans, forward and backward, and the attention of cuDNN and flash;
`layers` whole layers with their projections; `sweep` the tilings of each kernel; `check` compares the errors of every
kernel against float64 with those of the torch form in the same dtype. Medians of CUDA events, random data, 16 heads of
128 or width 2048, 32k tokens in all.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, softplus

from regard.kernels.recurrent import wkv as wkv_module
from regard.kernels.recurrent.linear_attention import linear_attention as linear
from regard.kernels.recurrent.linear_scan import chunked as scan_chunked
from regard.kernels.recurrent.linear_scan.triton import autograd as scan_spans
from regard.kernels.recurrent.selective_scan import chunked as selective_chunked
from regard.kernels.recurrent.selective_scan.triton import autograd as selective_spans
from regard.kernels.recurrent.wkv import EMPTY, Sums, wkv
from regard.layout import TokenLayout
from regard.parts.attention import Attention
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2

TOKENS, DEVICE = 32768, "cuda"


def milliseconds(work: Callable[[], object]) -> float:
    return triton.testing.do_bench(work, warmup=30, rep=150, return_mode="median")


def forward_backward(work: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    out = work(*inputs)
    d_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(work(*inputs), inputs, d_out)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


# ---------------------------------------------------------------------------------------------------------------- check


def error(ours: list[Tensor], exact: list[Tensor]) -> float:
    """The largest ‖ours - exact‖ / ‖exact‖; NaN if any is."""
    errors = [((a.double() - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(ours, exact, strict=True)]
    return torch.stack(errors).max().item()


def results(scan: Callable, case: list[Tensor | None], rest: list, seed: int) -> list[Tensor]:
    """Outputs, and the gradients of all inputs for random gradients of the outputs."""
    case = [None if x is None else x.detach().requires_grad_() for x in case]
    outs = scan(*case, *rest)
    draws = torch.Generator(DEVICE).manual_seed(seed)
    grads = [
        torch.randn(x.shape, generator=draws, device=DEVICE).bfloat16().to(x.dtype) for x in outs
    ]  # equal in all dtypes
    return [*outs, *torch.autograd.grad(outs, [x for x in case if x is not None], grads)]


def scan_cases() -> Iterator[tuple[str, list[Tensor | None], list]]:
    for name, (B, H, G, L, N, P), decay, packed in (
        ("linear", (2, 4, 4, 1000, 128, 128), None, False),
        ("linear, z", (2, 4, 4, 1000, 128, 129), None, False),
        ("linear packed, z", (2, 3, 3, 777, 64, 65), None, True),
        ("retention", (2, 4, 4, 1000, 64, 128), "head", False),
        ("mamba-2", (2, 8, 2, 1000, 128, 64), "token", False),
        ("mamba-2 packed", (2, 8, 1, 333, 128, 64), "token", True),
        ("wide", (1, 2, 1, 600, 256, 64), "token", False),
    ):
        q, k, v = (torch.randn(B, h, L, e, device=DEVICE) / e**0.5 for h, e in ((G, N), (G, N), (H, P)))
        steps = {None: None, "head": -torch.rand(H, device=DEVICE), "token": -torch.rand(B, H, L, device=DEVICE)}[decay]
        state = torch.randn(B, H, N, P, device=DEVICE)
        documents = (torch.rand(B, L, device=DEVICE) < 0.02).cumsum(1) if packed else None
        valid = torch.rand(B, L, device=DEVICE) < 0.9 if packed else None
        yield name, [q, k, v, steps, state], [documents, valid]


def selective_cases() -> Iterator[tuple[str, list[Tensor | None], list]]:
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
        documents = (torch.rand(B, L, device=DEVICE) < 0.02).cumsum(1) if packed else None
        valid = torch.rand(B, L, device=DEVICE) < 0.9 if packed else None
        yield name, [bias, u, delta, A, b, c, D, state], [documents, valid]


def wkv_cases() -> Iterator[tuple[str, list[Tensor | None], list]]:
    for name, (B, L, F), packed in (("wkv", (2, 500, 64), False), ("wkv packed", (2, 333, 40), True)):
        k, v = 3 * draw(B, L, F, dtype=torch.float32), draw(B, L, F, dtype=torch.float32)
        decay, bonus = -torch.rand(F, device=DEVICE) * 2, torch.randn(F, device=DEVICE)
        state = [torch.randn(B, F, device=DEVICE) + shift for shift in (0, 5, 0)]
        documents = (torch.rand(B, L, device=DEVICE) < 0.02).cumsum(1) if packed else None
        valid = torch.rand(B, L, device=DEVICE) < 0.9 if packed else None
        yield name, [k, v, decay, bonus, *state], [documents, valid]


def flat_wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, last = wkv(k, v, decay, bonus, Sums(*rest[:3]), *rest[3:])
    return out, last.value * last.peak.exp(), last.weight * last.peak.exp()


def bias_first(scan: Callable) -> Callable:
    return lambda bias, *case: scan(*case, bias)


def refuse_triton(device: torch.device) -> str:
    return "the torch form is measured"


def check_one(trial: tuple[str, str, torch.dtype]) -> str:
    kind, name, dtype = trial
    torch.manual_seed(0)
    case, rest = next((case, rest) for found, case, rest in CASES[kind]() if found == name)
    if kind == "scan":
        low = [x.to(dtype) for x in case[:3]] + case[3:]
        kernel, plain = scan_spans.scan, scan_chunked.scan
    elif kind == "wkv":
        low = [x.to(dtype) for x in case[:2]] + case[2:]
        kernel, plain = flat_wkv, patch.object(wkv_module, "cannot_triton", refuse_triton)(flat_wkv)
    else:
        low = [x.to(dtype) if i in (1, 2, 4, 5) else x for i, x in enumerate(case)]
        kernel, plain = bias_first(selective_spans.selective_scan), bias_first(selective_chunked.selective_scan)
    exact = results(plain, [x if x is None else x.double() for x in low], rest, 0)
    first = results(kernel, low, rest, 0)
    equal = all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, results(kernel, low, rest, 0), strict=True))
    both = [[error([f], [e]) for f, e in zip(x, exact, strict=True)] for x in (first, results(plain, low, rest, 0))]
    errors = "  ".join(f"{ours:.1e}|{theirs:.1e}" for ours, theirs in zip(*both, strict=True))
    return f"  {name:16} {str(dtype)[6:]:9} six runs {'equal' if equal else 'DIFFER'}  {errors}"


CASES = {"scan": scan_cases, "selective": selective_cases, "wkv": wkv_cases}


def check(pool: ProcessPoolExecutor) -> None:
    print("errors of each output and gradient against float64, ‖Δ‖/‖exact‖: kernel | torch in that dtype")
    dtypes = (torch.bfloat16, torch.float32)
    trials = [(kind, name, dtype) for dtype in dtypes for kind in CASES for name, *_ in CASES[kind]()]
    for trial, result in [(trial, pool.submit(check_one, trial)) for trial in trials]:
        print(result.result() if result.exception() is None else f"  {trial}: {result.exception()!s:.200}", flush=True)


# ---------------------------------------------------------------------------------------------------------------- sweep

READS = [(128, 4), (64, 4), (128, 8), (64, 8)]
STATES = [(128, 64, 4), (128, 64, 8), (64, 64, 4), (64, 128, 4), (128, 128, 8)]
SELECTIVE = [(16, 32), (32, 32)]
LINEAR, MAMBA2 = (8, 16, 16, 4096, 128, 128), (8, 64, 1, 4096, 128, 64)


def scan_inputs(B: int, H: int, G: int, L: int, N: int, P: int) -> tuple[Tensor, ...]:
    """Queries, keys and values in the memory order of projections, (B, L, heads, dim)."""
    return tuple(draw(B, L, h, e).transpose(1, 2) / e**0.5 for h, e in ((G, N), (G, N), (H, P)))


def passes(kind: str) -> dict[str, Callable[[], object]]:
    """The kernel launches of one scan by name."""
    B, H, G, L, N, P = LINEAR if kind == "linear" else MAMBA2
    q, k, v = scan_inputs(B, H, G, L, N, P)
    d_out, decay = draw(B, H, L, P), None if kind == "linear" else -torch.rand(B, H, L, device=DEVICE)
    case = scan_spans.ScanLaunch.of(k, v, decay, None)
    state, one = torch.zeros(B, H, N, P, device=DEVICE), torch.randn(B, H, L, device=DEVICE)
    out, borders = draw(B, H, L, P), draw(B * H, case.spans + 1, N * P)
    more = (None, None, None)
    if kind == "linear":
        more = (one, one, torch.randn(B * H, case.spans + 1, N, device=DEVICE))
    dots_of = None if decay is None else (v, out)
    return {
        "states": lambda: case.states(k, v, state),
        "out": lambda: case.read(q, k, v, borders),
        "dq": lambda: case.read(d_out, v, k, borders, *more, transposed=True),
        "dk": lambda: case.read(v, d_out, q, borders, *more, transposed=True, reverse=True),
        "dv": lambda: case.read(k, q, d_out, borders, reverse=True, dots_of=dots_of),
    }


def selective_passes() -> dict[str, Callable[[], object]]:
    u, delta, A, B, C, D, bias = selective_inputs(2, TOKENS // 2)
    A, B, C = A.mT.contiguous(), B.float().mT.contiguous(), C.float().mT.contiguous()
    state, dy = torch.zeros(2, *A.shape, device=DEVICE), draw(*u.shape)
    case = selective_spans.SelectiveScanLaunch.of(u, A, None)
    _, _, borders = selective_spans.selective_scan_op(u, delta, bias, A, B, C, D, state, None)
    return {
        "add and carry": lambda: case.borders(u, delta, bias, A, B, state),
        "forward": lambda: selective_spans.selective_scan_op(u, delta, bias, A, B, C, D, state, None),
        "back": lambda: case.borders(dy, delta, bias, A, C, state, reverse=True),
        "backward": lambda: selective_spans.selective_scan_backward(
            u, delta, bias, A, B, C, D, None, borders, dy, state
        ),
    }


def selective_inputs(B: int, L: int, F: int = 4096, N: int = 16) -> tuple[Tensor, ...]:
    A = -torch.arange(1, N + 1, device=DEVICE).float().expand(F, N).contiguous()
    D, bias = torch.ones(F, device=DEVICE), torch.full((F,), -4.0, device=DEVICE)
    return draw(B, L, F), draw(B, L, F), A, draw(B, L, N), draw(B, L, N), D, bias


def use(kind: str, tiles: tuple[int, ...]) -> None:
    if kind == "selective":
        selective_spans.CHUNK, selective_spans.BLOCK = tiles
    else:
        *rows, columns, warps = tiles
        scan_spans.state_tile = lambda y_dim, w_dim: (min([*rows, y_dim]), min(columns, w_dim), warps)
        scan_spans.read_tile = lambda w_dim, dtype: (min(columns, w_dim), warps)


def trials() -> list[tuple[str, tuple[int, ...]]]:
    scans = [(kind, tiles) for kind in ("linear", "mamba2") for tiles in READS + STATES]
    return scans + [("selective", tiles) for tiles in SELECTIVE]


def run(kind: str, tiles: tuple[int, ...], timed: bool) -> dict[str, float | None]:
    """Milliseconds of each launch with these tiles; None if they need more shared memory than the GPU has."""
    use(kind, tiles)
    works = selective_passes() if kind == "selective" else passes(kind)
    found: dict[str, float | None] = {}
    for name, work in works.items():
        if kind != "selective" and tiles not in (STATES if name == "states" else READS):
            continue
        try:
            work()
            found[name] = milliseconds(work) if timed else 0.0
        except triton.runtime.errors.OutOfResources:
            found[name] = None
    torch.cuda.synchronize()
    return found


def compile_only(trial: tuple[str, tuple[int, ...]]) -> None:
    run(*trial, timed=False)


def sweep(pool: ProcessPoolExecutor, kinds: tuple[str, ...] = ("linear", "mamba2", "selective")) -> None:
    print("milliseconds by tiles: rows and columns of a state, warps; or tokens and channels")
    chosen = [(kind, tiles) for kind, tiles in trials() if kind in kinds]
    list(pool.map(compile_only, chosen))
    for kind, tiles in chosen:
        found = run(kind, tiles, timed=True)
        cells = (f"{name} {'—' if ms is None else f'{ms:.3f}'}" for name, ms in found.items())
        print(f"  {kind:10} {tiles!s:18} {'  '.join(cells)}", flush=True)


# ----------------------------------------------------------------------------------------------------------------- time


def attention(backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = torch.zeros(*v.shape[:2], q.shape[3], v.shape[3] + 1, device=DEVICE)
    return linear(q, k, v, state)[0]


def mamba2(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    state = torch.zeros(*v.shape[:2], q.shape[3], v.shape[3], device=DEVICE)
    return scan_spans.scan(q, k, v, decay, state)[0]


def mamba(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    state = torch.zeros(len(u), *A.shape, device=DEVICE)
    return selective_spans.selective_scan(u, delta, A, B, C, D, state, bias=bias)[0]


def wkv_alone(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    zeros = torch.zeros(len(k), k.shape[2], device=DEVICE)
    return wkv(k, v, decay, torch.zeros_like(decay), Sums(zeros, zeros, zeros + EMPTY))[0]


def wkv_in_torch(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    with patch.object(wkv_module, "cannot_triton", refuse_triton):
        return wkv_alone(k, v, decay)


def candidates(n: int) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    B = TOKENS // n
    heads = tuple(draw(B, n, 16, 128).transpose(1, 2) for _ in range(3))
    small = scan_inputs(B, 64, 1, n, 128, 64)
    channels = draw(B, n, 2048), draw(B, n, 2048), -torch.rand(2048, device=DEVICE)
    return {
        "cudnn": (attention(SDPBackend.CUDNN_ATTENTION), heads),
        "flash": (attention(SDPBackend.FLASH_ATTENTION), heads),
        "linear 16×128": (linear_attention, (heads[0].abs(), heads[1].abs(), heads[2])),
        "retention 16×128": (mamba2, (*heads, -torch.rand(16, device=DEVICE))),
        "mamba-2 32×64, N 128": (mamba2, (*small[:2], small[2][:, :32], -torch.rand(B, 32, n, device=DEVICE))),
        "mamba-2 64×64, N 128": (mamba2, (*small, -torch.rand(B, 64, n, device=DEVICE))),
        "mamba 4096, N 16": (mamba, selective_inputs(B, n)),
        "wkv 2048": (wkv_alone, channels),
        "wkv 2048, torch": (wkv_in_torch, channels),
    }


def compile_candidate(name: str) -> None:
    work, inputs = candidates(4096)[name]
    forward_backward(work, *inputs)()


def time(pool: ProcessPoolExecutor) -> None:
    print("milliseconds, forward | forward and backward; 32768 tokens in all, bf16")
    list(pool.map(compile_candidate, candidates(4096)))
    for n in (4096, 16384):
        cells = []
        for name, (work, inputs) in candidates(n).items():
            with torch.no_grad():
                forward = milliseconds(lambda work=work, inputs=inputs: work(*inputs))
            cells.append(f"{name} {forward:.2f} | {milliseconds(forward_backward(work, *inputs)):.2f}")
        print(f"  n = {n:5}   {'   '.join(cells)}", flush=True)


def layers(pool: ProcessPoolExecutor) -> None:
    print("milliseconds of a layer of width 2048, forward and backward; 32768 tokens in all, bf16: eager | compiled")
    for n in (16384,):
        x, layout = draw(TOKENS // n, n, 2048), TokenLayout.whole(TOKENS // n, n, DEVICE)
        cells = []
        for name, spec in {"attention": Attention(16, position=Rope()), "mamba": Mamba(), "mamba-2": Mamba2()}.items():
            with torch.device(DEVICE):
                layer = spec.build(2048).bfloat16()
            eager, compiled = (milliseconds(training_step(form, x, layout)) for form in (layer, torch.compile(layer)))
            cells.append(f"{name} {eager:.2f} | {compiled:.2f}")
        print(f"  n = {n:5}   {'   '.join(cells)}", flush=True)


def training_step(layer: Callable, x: Tensor, layout: TokenLayout) -> Callable[[], object]:
    x, leaves = x.detach().requires_grad_(), list(layer.parameters())
    return lambda: torch.autograd.grad(layer(x, layout), [x, *leaves], x.detach())


if __name__ == "__main__":
    parts = {"check": check, "time": time, "layers": layers, "sweep": sweep}  # sweep is last: it changes the tiles
    parts["selective"] = partial(sweep, kinds=("selective",))
    # Compiling takes seconds per kernel, so that many run in parallel; Triton caches the results on disk. Each has its
    # own process, because a failed kernel makes all later ones in its process fail.
    with ProcessPoolExecutor(15, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for part in sys.argv[1:] or ("check", "time", "layers", "sweep"):
            parts[part](pool)
