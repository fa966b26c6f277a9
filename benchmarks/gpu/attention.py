"""Flash attention in Triton compared with flex attention and PyTorch's kernels: `python -m benchmarks.gpu.attention`.

Bf16, 16 heads of 128, 32k tokens in all. First random cases are checked against the reference in float64; then medians
of forward, and of forward with backward, in ms and in TFLOP/s of the pairs that the mask allows (backward counts 2.5
times). `--sweep` tries tiles, warps and stages of every kernel, which several processes compile beforehand.
"""

import argparse
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from benchmarks.gpu.check import check_all
from regard.kernels.attention import BACKENDS, triton
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.kernels.attention.bias import Slopes
from regard.kernels.attention.mask import Causal, Mask
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.triton import launch
from regard.layout import TokenLayout

HEADS, KV_HEADS, DIM, TOKENS = 16, 4, 128, 32768
WINDOW, CAP, DOCUMENT = 1024, 50.0, 1000
LENGTHS = (4096, 16384)
DEFAULT_SIZES = dict(launch.SIZES)
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    length: int

    @property
    def mask(self) -> Mask:
        return Window(WINDOW) if self.name == "window" else Causal()

    @property
    def flops(self) -> float:
        n, keys = self.length, min(self.length, WINDOW if self.name == "window" else self.length)
        if self.name == "packed":
            n = keys = DOCUMENT
        return 4 * DIM * HEADS * TOKENS / n * (n * keys - keys * (keys - 1) / 2)

    def inputs(self, batch: int | None = None) -> list[Tensor]:
        batch, kv_heads = batch or TOKENS // self.length, KV_HEADS if self.name == "grouped" else HEADS
        shapes = [(batch, heads, self.length, DIM) for heads in (HEADS, kv_heads, kv_heads)]
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    def layout(self, batch: int) -> TokenLayout:
        whole = TokenLayout.whole(batch, self.length, "cuda")
        if self.name != "packed":
            return whole
        slots = whole.positions
        return TokenLayout(slots % DOCUMENT, slots // DOCUMENT, valid=slots >= 0, consecutive=True)

    @property
    def slopes(self) -> Tensor:
        return 2.0 ** -torch.linspace(0.5, 8, HEADS, device="cuda")

    def regard(self, batch: int | None = None, statistics: bool = False) -> AttentionFunction:
        layout = self.layout(batch or TOKENS // self.length)
        bias, cap = Slopes(self.slopes) if self.name == "alibi" else None, CAP if self.name == "softcap" else None
        options = ScoreOptions(self.mask, DIM**-0.5, bias, cap)
        if statistics:
            return lambda q, k, v: triton.attend_with_statistics(q, k, v, layout, options)[0]
        return lambda q, k, v: triton.attend(q, k, v, layout, options)

    def flex(self) -> AttentionFunction:
        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if self.name == "window":
                return (q >= k) & (q - k < WINDOW)
            return (q >= k) & (q // DOCUMENT == k // DOCUMENT) if self.name == "packed" else q >= k

        slopes = self.slopes

        def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + slopes[h] * (k - q)

        def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return CAP * torch.tanh(s / CAP)

        score_mod = {"alibi": alibi, "softcap": softcap}.get(self.name)
        torch._dynamo.reset()  # otherwise it stops compiling after a few variants
        mask = create_block_mask(allowed, None, None, self.length, self.length, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)

    def fused(self, kernel: SDPBackend) -> AttentionFunction:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend


NAMES = ("causal", "alibi", "softcap", "window", "grouped", "packed")


def forward(attend: AttentionFunction, tensors: list[Tensor]) -> Callable[[], object]:
    return torch.no_grad()(lambda: attend(*tensors))


def forward_backward(attend: AttentionFunction, tensors: list[Tensor]) -> Callable[[], object]:
    d_out = torch.randn_like(tensors[0])
    return lambda: torch.autograd.grad(attend(*tensors), tensors, d_out)


def milliseconds(run: Callable[[], object]) -> float:
    return do_bench(run, warmup=20, rep=80, return_mode="median")


def compile_job(job: tuple) -> None:
    """Compile the kernels of a measurement in another process; Triton caches them on disk."""
    with suppress(OutOfResources):  # reported when it is measured
        kind, case, *sizes = job
        tensors = case.inputs(1 if kind != "flex" else None)
        if kind == "flex":
            forward_backward(case.flex(), tensors)()
            forward(case.flex(), tensors)()
            return
        launch.SIZES |= DEFAULT_SIZES | {kernel: launch.TileSize(*size) for kernel, size in sizes}
        if kind == "statistics":
            forward(case.regard(1, True), tensors)()
        elif kind == "forward":
            forward(case.regard(1), tensors)()
        else:
            forward_backward(case.regard(1), tensors)()


def compile_all(jobs: list[tuple]) -> None:
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        list(pool.imap_unordered(compile_job, jobs))


SWEEP = {
    "forward": [(128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3)],
    "query_gradients": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2)],
    "key_gradients": [(64, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 3), (32, 128, 8, 3)],
}


def sweep(names: list[str]) -> None:
    """Print the ms of each kernel for every tile size, for rows of 16384 tokens."""
    kinds = {"forward": "forward", "query_gradients": "forward_backward", "key_gradients": "forward_backward"}
    compile_all([(kinds[k], Case(n, 16384), (k, size)) for n in names for k, sizes in SWEEP.items() for size in sizes])
    for kernel, sizes in SWEEP.items():
        run = forward if kernel == "forward" else forward_backward
        for size in sizes:
            launch.SIZES[kernel], times = launch.TileSize(*size), []
            for name in names:
                case = Case(name, 16384)
                try:
                    times.append(milliseconds(run(case.regard(), case.inputs())))
                except OutOfResources:
                    times.append(float("inf"))
            print(f"{kernel:12} {str(size):18} {'  '.join(f'{ms:.3f}' for ms in times)}", flush=True)
        launch.SIZES |= DEFAULT_SIZES


def table(names: list[str]) -> None:
    cases = [Case(name, n) for name in names for n in LENGTHS]
    jobs = [(kind, case) for kind in ("flex", "forward_backward") for case in cases]
    compile_all([*jobs, *[("statistics", Case("causal", n)) for n in LENGTHS]])
    for case in cases:
        candidates = {"regard": case.regard(), "flex": case.flex()}
        if case.name == "causal":
            candidates["flash"] = case.fused(SDPBackend.FLASH_ATTENTION)
            candidates["cudnn"] = case.fused(SDPBackend.CUDNN_ATTENTION)
        tensors, line = case.inputs(), []
        for run, flops_factor in ((forward, 1.0), (forward_backward, 3.5)):
            times = {name: milliseconds(run(attend, tensors)) for name, attend in candidates.items()}
            flops = flops_factor * case.flops
            rates = "  ".join(f"{name} {ms:.2f} ms {flops / ms / 1e9:.0f}" for name, ms in times.items())
            line.append(f"{rates}  regard/flex {times['flex'] / times['regard']:.2f}")
        print(f"{case.name:8} {case.length:6}  forward: {line[0]}  |  both: {line[1]}", flush=True)
    for n in LENGTHS:
        case = Case("causal", n)
        without, with_statistics = (
            milliseconds(forward(case.regard(statistics=s), case.inputs())) for s in (False, True)
        )
        print(f"statistics {n}: {with_statistics / without - 1:+.1%}", flush=True)


def single_precision() -> None:
    """Print the ms in float32, for which Triton has no matrix units, of the backends that `auto` chooses among."""
    case = Case("window", 4096)
    tensors, layout = [x.detach().float().requires_grad_() for x in case.inputs(1)], case.layout(1)
    for options in (ScoreOptions(case.mask, DIM**-0.5), ScoreOptions(Causal(), DIM**-0.5, softcap=CAP)):
        times = {}
        for name, module in BACKENDS.items():
            if module.unsupported_reason(describe(*tensors, layout, options)) is None:
                attend = partial(module.attend, layout=layout, options=options)
                times[name] = [round(milliseconds(run(attend, tensors)), 2) for run in (forward, forward_backward)]
        print(f"float32 {type(options.mask).__name__}: {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--sweep", nargs="*", choices=NAMES)
    parser.add_argument("--float32", action="store_true", help="measure the backends in float32 instead")
    parser.add_argument("--check", type=int, default=56, help="number of random cases")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.check:
        check_all(arguments.check)
    if arguments.sweep is not None:
        return sweep(arguments.sweep or ["causal"])
    return single_precision() if arguments.float32 else table(arguments.cases)


if __name__ == "__main__":
    main()
