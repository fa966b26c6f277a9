"""FlashAttention in Triton on a GPU: accuracy, compilation to one graph, O(n) memory, and speed."""

import pytest
import torch
from torch import Tensor

from regard.kernels.attention import select_backend, triton
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.kernels.attention.mask import Causal, Full
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout

pytestmark = pytest.mark.gpu


def inputs(length: int, batch: int = 1, heads: int = 8, dim: int = 64) -> list[Tensor]:
    shape = (batch, heads, length, dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def forward_backward(attend, tensors: list[Tensor], layout: TokenLayout, options: ScoreOptions) -> list[Tensor]:
    out = attend(*tensors, layout, options)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


def seconds(run) -> float:
    from triton.testing import do_bench

    return do_bench(run, return_mode="median") / 1e3


@pytest.mark.ledger("flash.tiled", "flash.exact", "flash.backward")
@pytest.mark.parametrize("number", range(40))
def test_random_cases_are_as_accurate_as_pytorch(number: int) -> None:
    from benchmarks.gpu.check import check

    worst, case = check(number)
    assert worst <= 1, case


def test_float32_is_refused_with_the_reason() -> None:
    tensors = [x.float() for x in inputs(64)]
    assert "less exact than PyTorch in float32" in (
        triton.unsupported_reason(describe(*tensors, TokenLayout.whole(1, 64, "cuda"), ScoreOptions(Causal()))) or ""
    )


def test_auto_chooses_triton_where_pytorch_has_no_kernel() -> None:
    tensors, layout = inputs(256), TokenLayout.whole(1, 256, "cuda")
    sinks = torch.zeros(8, device="cuda")
    for options in (ScoreOptions(Window(64)), ScoreOptions(Causal(), softcap=30.0), ScoreOptions(Full(), sinks=sinks)):
        assert select_backend(*tensors, layout, options)[0] == "triton"
    name, reason = select_backend(*tensors, layout, ScoreOptions(Causal()))
    assert (name, "PyTorch's kernels are faster" in reason) == ("sdpa", True)


def test_compiles_in_one_graph() -> None:
    tensors, layout = inputs(300), TokenLayout.whole(1, 300, "cuda")
    options = ScoreOptions(Window(64), 0.125, softcap=20.0)

    @torch.compile(fullgraph=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return triton.attend(q * 1.0, k, v, layout, options)

    found = forward_backward(lambda q, k, v, layout, options: compiled(q, k, v), tensors, layout, options)
    expected = forward_backward(triton.attend, tensors, layout, options)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.ledger("flash.exact")
def test_memory_is_linear_and_time_quadratic_in_the_length() -> None:
    peaks, times = [], []
    for n in (16384, 32768):
        tensors, layout, options = (
            inputs(n, heads=16, dim=128),
            TokenLayout.whole(1, n, "cuda"),
            ScoreOptions(Causal(), 0.09),
        )
        forward_backward(triton.attend, tensors, layout, options)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward_backward(triton.attend, tensors, layout, options)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        times.append(seconds(lambda t=tensors, a=layout, s=options: forward_backward(triton.attend, t, a, s)))
    assert peaks[1] < 2.1 * peaks[0]
    assert 3.0 < times[1] / times[0] < 4.5


@pytest.mark.ledger("flash.speed")
@pytest.mark.parametrize("n", [1024, 4096, 8192])
def test_triton_is_faster_than_materialized_scores(n: int) -> None:
    """The products are the same; the n × n scores are not written to memory and read again."""
    batch = 2 * (8192 // n) ** 2  # equally many scores at every length, enough to hide the launch overhead
    tensors, layout, options = (
        inputs(n, batch, heads=16, dim=128),
        TokenLayout.whole(batch, n, "cuda"),
        ScoreOptions(Causal(), 0.09),
    )
    future_keys = torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1)

    def materialized(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
        return (q @ k.mT * options.scale).masked_fill(future_keys, -torch.inf).softmax(-1) @ v

    materialized_seconds = seconds(lambda: forward_backward(materialized, tensors, layout, options))
    triton_seconds = seconds(lambda: forward_backward(triton.attend, tensors, layout, options))
    assert materialized_seconds > 2 * triton_seconds
