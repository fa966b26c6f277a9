"""Attention of decoding steps on a GPU, with split keys and with PyTorch's kernels: `python -m benchmarks.gpu.decode`.

Bf16, 32 heads and 8 kv heads of 128, 64 rows of 4096 keys: 1.07 GB of keys and values. Medians are printed as TB/s of
the keys and values attended to, and as a share of the bandwidth of a large copy in the same run; then the kernel is
checked against the reference in float64. `--step` times a whole compiled step of two layers through the stores,
`--sweep` tries tiles, splits, warps and stages. Several processes compile the kernels beforehand.
"""

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench, do_bench_cudagraph

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention import backend, reference, sdpa
from regard.kernels.attention.arguments import Pages, ScoreOptions, gather_pages
from regard.kernels.attention.decode import mask_limits
from regard.kernels.attention.mask import Causal, Mask
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.triton.decode_kernels import launch
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention, use_backend
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope

HEADS, KV_HEADS, DIM = 32, 8, 128


@dataclass(frozen=True)
class Case:
    rows: int = 64
    keys: int = 4096
    page: int = 16  # tokens per page; 0: contiguous store
    queries: int = 1
    mask: Mask = Causal()
    ragged: bool = False  # rows of all lengths, not of full length
    dtype: torch.dtype = torch.bfloat16

    def build(self) -> tuple[Tensor, Tensor | Pages, Tensor | Pages, TokenLayout, ScoreOptions]:
        rows, keys, page = self.rows, self.keys, self.page
        q = torch.randn(rows, HEADS, self.queries, DIM, device="cuda", dtype=self.dtype)
        if page:
            table = (1 + torch.randperm(rows * keys // page, device="cuda")).view(rows, -1)
            shape = (rows * keys + page, KV_HEADS, DIM)
            pools = [torch.randn(shape, device="cuda", dtype=self.dtype) for _ in range(2)]
            k, v = (Pages(pool, table, page) for pool in pools)
        else:
            k, v = torch.randn(2, rows, KV_HEADS, keys + 1, DIM, device="cuda", dtype=self.dtype)[:, :, :, :-1]
        last = torch.linspace(self.queries, keys, rows, device="cuda").long() if self.ragged else keys
        ends = torch.zeros(rows, device="cuda", dtype=torch.int64) + last  # (B,)
        positions = ends.unsqueeze(-1) - self.queries + torch.arange(self.queries, device="cuda")
        layout = TokenLayout(positions).with_keys(torch.arange(keys, device="cuda").expand(rows, keys))
        return q, k, v, layout, ScoreOptions(self.mask, DIM**-0.5)

    def bytes(self) -> float:
        """Bytes of the keys and values that the queries attend to."""
        ends = torch.linspace(self.queries if self.ragged else self.keys, self.keys, self.rows)
        if isinstance(self.mask, Window):
            ends = ends.clamp_max(self.mask.size + self.queries - 1)
        return ends.sum().item() * 2 * KV_HEADS * DIM * self.dtype.itemsize


def prepare_launch(case: Case, tensors: tuple, **tiling: int) -> Callable[[], Tensor]:
    q, k, v, layout, options = tensors
    before, after, first = mask_limits(options.mask)
    table = k.table if case.page else None
    k, v = (x.pool if case.page else x for x in (k, v))
    return lambda: launch(
        q, k, v, table, case.page, layout.positions, layout.key_positions, None,
        before, after, first, options.scale, None, "none",
        None, None, **tiling,
    )  # fmt: skip


def median_ms(run: Callable[[], object]) -> float:
    """Milliseconds in a CUDA graph, which excludes the launch overhead of Python."""
    return do_bench_cudagraph(run, rep=60, return_mode="median")


def copy_rate() -> float:
    """Bytes per second, read and written, of a 2 GB copy."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    ms = do_bench(lambda: target.copy_(source), warmup=10, rep=60, return_mode="median")  # slower in a graph
    return 2 * source.nbytes / ms * 1e3


CONFIGS = [
    dict(block=block, warps=warps, stages=stages)
    for block, warps, stages in [
        (32, 2, 4), (32, 4, 3), (32, 4, 5), (32, 4, 7), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 4, 5),
        (64, 4, 7), (64, 8, 3), (64, 8, 5), (128, 4, 2), (128, 4, 3), (128, 4, 5), (128, 8, 3), (128, 8, 5),
    ]
]  # fmt: skip


CASES = {
    "64 × 4096, contiguous": Case(page=0),
    "64 × 4096, page 16": Case(),
    "64 × 4096, page 8": Case(page=8),
    "64 × 4096, page 32": Case(page=32),
    "64 × 4096, page 64": Case(page=64),
    "64 × 4096, page 128": Case(page=128),
    "64 × 4096, ragged, page 16": Case(ragged=True),
    "64 × 4096, ragged, contiguous": Case(ragged=True, page=0),
    "64 × 4096, 4 queries, page 16": Case(queries=4),
    "64 × 4096, 16 queries, page 16": Case(queries=16),
    "8 × 4096, page 16": Case(rows=8),
    "1 × 1024, page 16": Case(rows=1, keys=1024),
    "1 × 32768, page 16": Case(rows=1, keys=32768),
    "16 × 32768, page 16": Case(rows=16, keys=32768),
    "64 × 16384, window 1024, page 16": Case(keys=16384, mask=Window(1024)),
    "64 × 4096, float32, page 16": Case(dtype=torch.float32),
}


def compile_some(index: int, processes: int, sweeping: bool) -> None:
    for case in list(CASES.values())[index::processes]:
        backend("decode")(*case.build())
    for page in (0, 16) if sweeping else ():
        case = Case(rows=8, page=page)
        tensors = case.build()
        for tiling in CONFIGS[index::processes]:
            with suppress(OutOfResources):
                prepare_launch(case, tensors, splits=4, **tiling)()


def compile_all(sweeping: bool) -> None:
    processes = min(15, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(n, processes, sweeping)) for n in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def sweep(bandwidth: float) -> None:
    for page in (16, 0):
        case = Case(page=page)
        tensors, results = case.build(), []
        for tiling, splits in itertools.product(CONFIGS, (1, 2, 4, 8)):
            with suppress(OutOfResources):
                ms = median_ms(prepare_launch(case, tensors, splits=splits, **tiling))
                results.append((case.bytes() / ms * 1e3 / bandwidth, splits, tiling))
        results.sort(key=lambda result: -result[0])
        print(f"page {page}: best and worst of {len(results)}")
        for share, splits, tiling in [*results[:9], results[-1]]:
            print(f"  {share:6.1%}  splits {splits}  {tiling}", flush=True)


def measure_case(name: str, case: Case, bandwidth: float) -> None:
    tensors = case.build()
    q, k, v, layout, options = tensors
    candidates = {"decode": lambda: backend("decode")(*tensors)}
    if case.page and case.keys == 4096:
        candidates["gather + sdpa"] = lambda: sdpa.attend(q, gather_pages(k), gather_pages(v), layout, options)
    elif not case.page:
        candidates["sdpa, our mask"] = lambda: sdpa.attend(q, k, v, layout, options)
        candidates["sdpa, no mask"] = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for method, run in candidates.items():
        ms = median_ms(run)
        tb = case.bytes() / ms / 1e9
        print(
            f"{name:34} {method:15} {ms * 1e3:9.1f} us {tb:6.2f} TB/s {tb * 1e12 / bandwidth:6.1%} of copy", flush=True
        )


def check() -> None:
    worst = 0.0
    for dtype, page, queries, mask, ragged in itertools.product(
        (torch.bfloat16, torch.float32), (0, 16), (5,), (Causal(), Window(100)), (False, True)
    ):
        tensors = Case(5, 1024, page, queries, mask, ragged, dtype).build()
        q, k, v, layout, options = tensors
        exact = reference.attend(q.double(), gather_pages(k).double(), gather_pages(v).double(), layout, options)
        sdpa_out = sdpa.attend(q, gather_pages(k), gather_pages(v), layout, options)
        out = backend("decode")(*tensors)
        error, sdpa_error = ((x - exact).abs().max().item() for x in (out, sdpa_out))
        limit = 2 * sdpa_error + torch.finfo(dtype).eps
        worst = max(worst, error / limit)
        assert error <= limit, (dtype, page, queries, mask, ragged, error, sdpa_error)
    print(f"checked 16 cases against the reference in float64; the largest error is {worst:.2f} of the tolerance")


def whole_step() -> None:
    """Print the time of a compiled step of two narrow layers, most of which is attention through a store."""
    rows, keys = 64, 4096
    block = Block((Sublayer(Attention(HEADS, KV_HEADS, DIM, position=Rope())), Sublayer(SwiGLU(512))))
    with torch.device("cuda"):
        model = Decoder(1024, 1024, (Repeat((block,), 2),)).build(seed=0)
    model = model.bfloat16().eval().requires_grad_(False)
    ids = torch.zeros(rows, 1, dtype=torch.long, device="cuda")
    positions = torch.full((rows, 1), keys - 1, device="cuda")
    stores = {
        "paged": Paged(model.spec.memory(), rows, keys, torch.bfloat16, "cuda", blocks=rows * keys // 16),
        "contiguous": Contiguous(model.spec.memory(), rows, keys, torch.bfloat16, "cuda"),
    }
    for kind, store in stores.items():
        assert all(store.reserve(row, keys) for row in range(rows))
        for storage in store.storages:
            for array in storage.arrays.values():
                array.normal_()
        for name in ("auto", "sdpa"):
            use_backend(model, name)
            torch._dynamo.reset()

            def step(store=store) -> Tensor:
                layout = TokenLayout(positions)
                return model.logits(model.hidden(ids, layout, store.begin_forward(layout, check=False))[:, 0])

            with torch.no_grad():
                compiled = torch.compile(step, fullgraph=True)
                without_graph = do_bench(compiled, warmup=10, rep=60, return_mode="median")
                print(f"two layers, 64 × 4096, {kind}, {name}: {without_graph * 1e3:.0f} us", end=", ", flush=True)
                print(f"in a graph {median_ms(compiled) * 1e3:.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--step", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.step:
        return whole_step()
    compile_all(arguments.sweep)
    bandwidth = copy_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy reaches {bandwidth / 1e12:.2f} TB/s",
        flush=True,
    )
    if arguments.sweep:
        return sweep(bandwidth)
    for name, case in CASES.items():
        measure_case(name, case, bandwidth)
    check()


if __name__ == "__main__":
    main()
