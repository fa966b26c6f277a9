"""Scans on a GPU compared with full attention: `python -m benchmarks.gpu.scans [check] [time] [layers] [sweep]`.

Without arguments all four run. `time` measures whole scans, forward and backward, and the attention of cuDNN and flash;
`layers` measures whole layers with their projections; `sweep` measures the tile sizes of each kernel (scan_tiles.py),
`selective` only those of the selective scan; `check` prints the errors of every kernel against float64
(scan_errors.py). Times are medians of CUDA events on random data with 16 heads of 128 or width 2048, 32k tokens in all.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.scan_errors import check
from benchmarks.gpu.scan_inputs import (
    DEVICE,
    TOKENS,
    draw,
    heads_inputs,
    milliseconds,
    refuse_triton,
    selective_inputs,
)
from benchmarks.gpu.scan_tiles import sweep
from regard.kernels.recurrent import linear_attention as linear_attention_module
from regard.kernels.recurrent import wkv as wkv_module
from regard.kernels.recurrent.linear_scan import ScanInputs
from regard.kernels.recurrent.linear_scan.triton import autograd as triton_scan
from regard.kernels.recurrent.selective_scan import SelectiveScanInputs
from regard.kernels.recurrent.selective_scan.triton import autograd as triton_selective_scan
from regard.kernels.recurrent.wkv import EMPTY, Sums, WKVInputs, wkv
from regard.layout import TokenLayout
from regard.parts.attention import Attention
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2


def forward_backward(work: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    out = work(*inputs)
    d_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(work(*inputs), inputs, d_out)


def attention(backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = torch.zeros(*v.shape[:2], q.shape[3], v.shape[3] + 1, device=DEVICE)
    return linear_attention_module.linear_attention(q, k, v, state)[0]


def mamba2(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    state = torch.zeros(*v.shape[:2], q.shape[3], v.shape[3], device=DEVICE)
    return triton_scan.scan(ScanInputs(q, k, v, log_decay, state))[0]


def mamba(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    state = torch.zeros(len(u), *A.shape, device=DEVICE)
    return triton_selective_scan.selective_scan(SelectiveScanInputs(u, delta, A, B, C, D, state, bias=bias))[0]


def wkv_from_empty(k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    zeros = torch.zeros(len(k), k.shape[2], device=DEVICE)
    return wkv(WKVInputs(k, v, log_decay, torch.zeros_like(log_decay), Sums(zeros, zeros, zeros + EMPTY)))[0]


def wkv_in_torch(k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    with patch.object(wkv_module, "cannot_run_triton", refuse_triton):
        return wkv_from_empty(k, v, log_decay)


def candidates(n: int) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    B = TOKENS // n
    heads = tuple(draw(B, n, 16, 128).transpose(1, 2) for _ in range(3))
    grouped = heads_inputs(B, 64, 1, n, 128, 64)
    channels = draw(B, n, 2048), draw(B, n, 2048), -torch.rand(2048, device=DEVICE)
    return {
        "cudnn": (attention(SDPBackend.CUDNN_ATTENTION), heads),
        "flash": (attention(SDPBackend.FLASH_ATTENTION), heads),
        "linear 16×128": (linear_attention, (heads[0].abs(), heads[1].abs(), heads[2])),
        "retention 16×128": (mamba2, (*heads, -torch.rand(16, device=DEVICE))),
        "mamba-2 32×64, N 128": (mamba2, (*grouped[:2], grouped[2][:, :32], -torch.rand(B, 32, n, device=DEVICE))),
        "mamba-2 64×64, N 128": (mamba2, (*grouped, -torch.rand(B, 64, n, device=DEVICE))),
        "mamba 4096, N 16": (mamba, selective_inputs(B, n)),
        "wkv 2048": (wkv_from_empty, channels),
        "wkv 2048, torch": (wkv_in_torch, channels),
    }


def compile_candidate(name: str) -> None:
    work, inputs = candidates(4096)[name]
    forward_backward(work, *inputs)()


def time_scans(pool: ProcessPoolExecutor) -> None:
    print("milliseconds, forward | forward and backward; 32768 tokens in all, bf16")
    list(pool.map(compile_candidate, candidates(4096)))
    for n in (4096, 16384):
        cells = []
        for name, (work, inputs) in candidates(n).items():
            with torch.no_grad():
                forward = milliseconds(lambda work=work, inputs=inputs: work(*inputs))
            cells.append(f"{name} {forward:.2f} | {milliseconds(forward_backward(work, *inputs)):.2f}")
        print(f"  n = {n:5}   {'   '.join(cells)}", flush=True)


def time_layers(pool: ProcessPoolExecutor) -> None:
    print("milliseconds of a layer of width 2048, forward and backward; 32768 tokens in all, bf16: eager | compiled")
    for n in (16384,):
        x, layout = draw(TOKENS // n, n, 2048), TokenLayout.whole(TOKENS // n, n, DEVICE)
        cells = []
        for name, spec in {"attention": Attention(16, position=Rope()), "mamba": Mamba(), "mamba-2": Mamba2()}.items():
            with torch.device(DEVICE):
                layer = spec.build(2048).bfloat16()
            eager, compiled = (
                milliseconds(training_step(module, x, layout)) for module in (layer, torch.compile(layer))
            )
            cells.append(f"{name} {eager:.2f} | {compiled:.2f}")
        print(f"  n = {n:5}   {'   '.join(cells)}", flush=True)


def training_step(layer: Callable, x: Tensor, layout: TokenLayout) -> Callable[[], object]:
    x, leaves = x.detach().requires_grad_(), list(layer.parameters())
    return lambda: torch.autograd.grad(layer(x, layout), [x, *leaves], x.detach())


if __name__ == "__main__":
    # sweep is last, because it changes the tiles.
    commands = {"check": check, "time": time_scans, "layers": time_layers, "sweep": sweep}
    commands["selective"] = partial(sweep, kinds=("selective",))
    # Compiling takes seconds per kernel, so kernels are compiled in parallel; Triton caches them on disk. Each has its
    # own process, because a failed kernel makes all later ones in its process fail.
    with ProcessPoolExecutor(15, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in sys.argv[1:] or ("check", "time", "layers", "sweep"):
            commands[name](pool)
