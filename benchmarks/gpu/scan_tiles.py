"""The time of each launch of the scan kernels, by the size of its tiles.

Run by `python -m benchmarks.gpu.scans sweep`; it changes the tiles of the modules that it measures.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
import triton

from benchmarks.gpu.scan_inputs import DEVICE, TOKENS, draw, heads_inputs, milliseconds, selective_inputs
from regard.kernels.recurrent.linear_scan.triton import autograd as triton_scan
from regard.kernels.recurrent.selective_scan.triton import autograd as triton_selective_scan

READS = [(128, 4), (64, 4), (128, 8), (64, 8)]
STATES = [(128, 64, 4), (128, 64, 8), (64, 64, 4), (64, 128, 4), (128, 128, 8)]
SELECTIVE = [(16, 32), (32, 32)]
LINEAR, MAMBA2 = (8, 16, 16, 4096, 128, 128), (8, 64, 1, 4096, 128, 64)


def linear_passes(kind: str) -> dict[str, Callable[[], object]]:
    """The kernel launches of one scan by name."""
    B, H, G, L, N, P = LINEAR if kind == "linear" else MAMBA2
    q, k, v = heads_inputs(B, H, G, L, N, P)
    d_out, log_decay = draw(B, H, L, P), None if kind == "linear" else -torch.rand(B, H, L, device=DEVICE)
    launch = triton_scan.ScanLaunch.of(k, v, log_decay, None)
    state, extra = torch.zeros(B, H, N, P, device=DEVICE), torch.randn(B, H, L, device=DEVICE)
    out, borders = draw(B, H, L, P), draw(B * H, launch.spans + 1, N * P)
    extra_inputs = (None, None, None)
    if kind == "linear":
        extra_inputs = (extra, extra, torch.randn(B * H, launch.spans + 1, N, device=DEVICE))
    dots_of = None if log_decay is None else (v, out)
    return {
        "states": lambda: launch.states(k, v, state),
        "out": lambda: launch.read(q, k, v, borders),
        "dq": lambda: launch.read(d_out, v, k, borders, *extra_inputs, transposed=True),
        "dk": lambda: launch.read(v, d_out, q, borders, *extra_inputs, transposed=True, reverse=True),
        "dv": lambda: launch.read(k, q, d_out, borders, reverse=True, dots_of=dots_of),
    }


def selective_passes() -> dict[str, Callable[[], object]]:
    u, delta, A, B, C, D, bias = selective_inputs(2, TOKENS // 2)
    A, B, C = A.mT.contiguous(), B.float().mT.contiguous(), C.float().mT.contiguous()
    state, dy = torch.zeros(2, *A.shape, device=DEVICE), draw(*u.shape)
    launch = triton_selective_scan.SelectiveScanLaunch.of(u, A, None)
    _, _, borders = triton_selective_scan.selective_scan_op(u, delta, bias, A, B, C, D, state, None)
    return {
        "add and carry": lambda: launch.borders(u, delta, bias, A, B, state),
        "forward": lambda: triton_selective_scan.selective_scan_op(u, delta, bias, A, B, C, D, state, None),
        "back": lambda: launch.borders(dy, delta, bias, A, C, state, reverse=True),
        "backward": lambda: triton_selective_scan.selective_scan_backward(
            u, delta, bias, A, B, C, D, None, borders, dy, state
        ),
    }


def use_tiles(kind: str, tiles: tuple[int, ...]) -> None:
    if kind == "selective":
        triton_selective_scan.CHUNK, triton_selective_scan.BLOCK = tiles
    else:
        *rows, columns, warps = tiles
        triton_scan.state_tile = lambda y_dim, w_dim: (min([*rows, y_dim]), min(columns, w_dim), warps)
        triton_scan.read_tile = lambda w_dim, dtype: (min(columns, w_dim), warps)


def trials() -> list[tuple[str, tuple[int, ...]]]:
    scans = [(kind, tiles) for kind in ("linear", "mamba2") for tiles in READS + STATES]
    return scans + [("selective", tiles) for tiles in SELECTIVE]


def measure(kind: str, tiles: tuple[int, ...], timed: bool) -> dict[str, float | None]:
    """Milliseconds of each launch with these tiles; None if they need more shared memory than the GPU has."""
    use_tiles(kind, tiles)
    launches = selective_passes() if kind == "selective" else linear_passes(kind)
    times: dict[str, float | None] = {}
    for name, work in launches.items():
        if kind != "selective" and tiles not in (STATES if name == "states" else READS):
            continue
        try:
            work()
            times[name] = milliseconds(work) if timed else 0.0
        except triton.runtime.errors.OutOfResources:
            times[name] = None
    torch.cuda.synchronize()
    return times


def compile_only(trial: tuple[str, tuple[int, ...]]) -> None:
    measure(*trial, timed=False)


def sweep(pool: ProcessPoolExecutor, kinds: tuple[str, ...] = ("linear", "mamba2", "selective")) -> None:
    print("milliseconds by tiles: rows and columns of a state, warps; or tokens and channels")
    selected = [(kind, tiles) for kind, tiles in trials() if kind in kinds]
    list(pool.map(compile_only, selected))
    for kind, tiles in selected:
        times = measure(kind, tiles, timed=True)
        cells = (f"{name} {'—' if ms is None else f'{ms:.3f}'}" for name, ms in times.items())
        print(f"  {kind:10} {tiles!s:18} {'  '.join(cells)}", flush=True)
