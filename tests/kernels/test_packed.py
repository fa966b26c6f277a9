"""The kernel for weights of few bits against plain sums in float64, for every layout."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.kernels.packed import build, packed_linear, why_no_packed_kernel
from regard.kernels.packed.layouts import BLOCK, LAYOUTS, KernelWeights, PackedLayout, pack, unpack

INPUTS = 512
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    if reason := why_no_packed_kernel():
        pytest.skip(reason)


def per_header(layout: PackedLayout) -> int:
    return {"k": 8, "f16": 1}.get(layout.scales, 4)


def draw(layout: PackedLayout, outputs: int) -> KernelWeights:
    rng = torch.Generator().manual_seed(layout.bits * 100 + outputs)

    def array(dtype: torch.dtype, count: int) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-32, 64, (outputs, count), generator=rng).to(dtype)
        return torch.randn(outputs, count, generator=rng).to(dtype)

    codes = torch.randint(0, 1 << layout.bits, (outputs, INPUTS), generator=rng)
    codes = (codes - 128).to(torch.int8) if layout.bits == 8 else codes.to(torch.uint8)
    header = tuple(array(dtype, INPUTS // BLOCK // per_header(layout)) for dtype in layout.header)
    return KernelWeights(codes, header, tuple(array(dtype, INPUTS // layout.group) for dtype in layout.block_scales))


def dense(weights: KernelWeights, layout: PackedLayout) -> Tensor:
    """W' in float64."""

    def spread(numbers: Tensor) -> Tensor:
        return numbers.double().repeat_interleave(INPUTS // numbers.shape[1], 1)

    header, scales = [spread(array) for array in weights.header], [spread(array) for array in weights.scales]
    codes = weights.codes.double() - layout.zero
    if layout.scales.endswith("header"):
        scale, *zero = header
        return scale * (codes - sum(zero))
    scale, *minimum = [a * b for a, b in zip(header, scales, strict=True)] if layout.scales == "k" else scales
    return scale * codes + sum(minimum)


def rounded(x: Tensor) -> Tensor:
    """x in eight bits with a scale per block, in float64."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks * torch.where(scale > 0, 1 / scale, 0)).round()
    return (codes.double() * scale.double()).flatten(-2)


def product(x: Tensor, weights: KernelWeights, layout: PackedLayout) -> Tensor:
    packed = pack(weights, layout, per_header(layout))
    return packed_linear(x, packed, len(weights.codes), LAYOUTS.index(layout), per_header(layout))


@EVERY_LAYOUT
@pytest.mark.parametrize("outputs", [8, 29])
def test_unpacked_weights_are_the_packed_ones(layout: PackedLayout, outputs: int) -> None:
    weights = draw(layout, outputs)
    found = unpack(pack(weights, layout, per_header(layout)), layout, per_header(layout), outputs, INPUTS)
    assert torch.equal(found.codes, weights.codes)
    for actual, expected in ((found.header, weights.header), (found.scales, weights.scales)):
        assert [array.dtype for array in actual] == [array.dtype for array in expected]
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@EVERY_LAYOUT
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2), (9,), (0,)])
def test_products_equal_sums_in_float64(layout: PackedLayout, shape: tuple[int, ...]) -> None:
    weights = draw(layout, 29)
    x = torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(1))
    x[..., :BLOCK] = 0
    y, expected = product(x, weights, layout), rounded(x) @ dense(weights, layout).t()
    assert y.shape == expected.shape and y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-6 * float(dense(weights, layout).norm()))


@EVERY_LAYOUT
def test_a_row_does_not_depend_on_the_others(layout: PackedLayout) -> None:
    weights, x = draw(layout, 16), torch.randn(7, INPUTS)
    together = product(x, weights, layout)
    assert all(torch.equal(product(row, weights, layout), y) for row, y in zip(x, together, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_spoils_its_row_only(bad: float) -> None:
    weights, x = draw(LAYOUTS[0], 16), torch.randn(3, INPUTS)
    x[1, 77] = bad
    y = product(x, weights, LAYOUTS[0])
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_the_kernel_is_traced_by_torch_compile() -> None:
    packed = pack(draw(LAYOUTS[8], 16), LAYOUTS[8], 1)
    torch.library.opcheck(
        torch.ops.regard.packed_linear.default, (torch.randn(3, INPUTS), packed, 16, 8, 1),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_without_a_compiler_there_is_a_reason(monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert build.load_library.__wrapped__() == "there is no C++ compiler (g++ or clang++)"


@pytest.mark.parametrize("compiler", ["/nonexistent/g++", "false"])
def test_a_failing_compiler_is_a_reason(monkeypatch, compiler: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    reason = build.load_library.__wrapped__()
    assert reason is not None and reason.startswith(f"{compiler} cannot compile the kernels in packed: ")


@pytest.mark.slow
def test_the_code_for_other_machines(tmp_path: Path) -> None:
    """All tests above, with the plain loops in place of the instructions of this machine."""
    program = (
        "import sys, pytest; from regard.kernels.packed import build; build.FLAGS.append('-DREGARD_PORTABLE'); "
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not slow', {str(Path(__file__))!r}]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-3000:]
