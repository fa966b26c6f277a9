"""FlashAttention in Triton equals the reference, with gradients: interpreted on a CPU, compiled on a GPU."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.kernels.attention import reference, triton
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.kernels.attention.bias import Buckets, Slopes
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.patterns.sparse_transformer import StridedPattern
from regard.kernels.attention.patterns.window import SinksAndWindow, Window
from regard.kernels.attention.statistics import attend_with_statistics
from regard.kernels.attention.triton.bounds import NO_DOCUMENT, bounds
from regard.layout import Bias, TokenLayout
from tests.kernels.triton_device import DEVICE

LENGTH = 37
MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "full": Full(),
    "window": Window(9),
    "window of a tile": Window(16),
    "window of a tile + 1": Window(17),
    "window, both sides": Window(5, causal=False),
    "sinks and window": SinksAndWindow(3, 7),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 × 16, so that short sequences have many tiles."""
    from regard.kernels.attention.triton import launch

    monkeypatch.setattr(launch, "BOUNDS_TILE", 16)
    for sizes in (launch.SIZES, launch.SMALL):
        for kernel in sizes:
            monkeypatch.setitem(sizes, kernel, launch.TileSize(16, 16, 4, 1))


def token_layout(kind: str, length: int = LENGTH) -> TokenLayout:
    slots = torch.arange(length, device=DEVICE).expand(2, length)
    documents = torch.stack([slots[0] // 15, (slots[1] >= 20).long()])
    starts = torch.stack([documents[0] * 15, documents[1] * 20])
    pad = torch.tensor([[3], [18]], device=DEVICE)
    return {
        "ordered": TokenLayout.whole(2, length, DEVICE),
        "packed": TokenLayout(slots - starts, documents, valid=slots < length - pad, consecutive=True),
        "padded left": TokenLayout((slots - pad).clamp_min(0), valid=slots >= pad, consecutive=True),
        "cached keys": TokenLayout(slots[:, 20:29]).with_keys(slots, valid=slots != 4),
    }[kind]


def options_of(mask: str, bias: str, extra: str) -> ScoreOptions:
    generator = torch.Generator().manual_seed(3)
    score_bias: Bias | None = None
    if bias == "slopes":
        score_bias = Slopes(torch.tensor([0.5, 0.1], device=DEVICE))
    if bias == "buckets":
        table = torch.randn(8, 2, generator=generator).to(DEVICE)
        score_bias = Buckets(table.requires_grad_(), 20, True)
    sinks = torch.tensor([0.5, -1.0], device=DEVICE, requires_grad=True) if "sinks" in extra else None
    return ScoreOptions(MASKS[mask], 0.3, score_bias, 1.5 if "cap" in extra else None, sinks)


def inputs(
    layout: TokenLayout, kv_heads: int = 1, dim: int = 16, value_dim: int = 16, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries, keys = layout.positions.shape[1], layout.key_positions.shape[1]
    shapes = [(2, queries, 2, dim), (2, keys, kv_heads, dim), (2, keys, kv_heads, value_dim)]
    tensors = [torch.randn(shape, generator=generator).to(DEVICE, dtype).transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in tensors]


def with_gradients(attend, tensors: list[Tensor], layout: TokenLayout, options: ScoreOptions) -> list[Tensor]:
    """The output at valid tokens, zeros at padding, and the gradients of all tensors that require one."""
    out = attend(*tensors, replace(layout), options)
    if layout.valid is not None:
        out = out.where(layout.valid.view(len(out), 1, -1, 1), 0)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=DEVICE).view_as(out)
    table = [options.bias.table] if isinstance(options.bias, Buckets) else []
    leaves = [*tensors, *table, *([] if options.sinks is None else [options.sinks])]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def largest_error(tensors: list[Tensor], layout: TokenLayout, options: ScoreOptions) -> float:
    assert triton.unsupported_by_kernel(describe(*tensors, layout, options)) is None
    found = with_gradients(triton.attend, tensors, layout, options)
    expected = with_gradients(
        reference.attend, [x.detach().double().requires_grad_() for x in tensors], layout, options
    )
    assert all(f.isfinite().all() for f in found)
    return max(((f - e).abs().max() / e.abs().max().clamp_min(1)).item() for f, e in zip(found, expected, strict=True))


CASES = [
    ("causal", "ordered", "none", "", {}),
    ("causal", "packed", "slopes", "cap", {"kv_heads": 2}),
    ("full", "padded left", "none", "sinks", {"dim": 24, "value_dim": 12}),
    ("window", "ordered", "buckets", "cap, sinks", {}),
    ("window of a tile", "ordered", "none", "", {"kv_heads": 2}),
    ("window of a tile + 1", "packed", "none", "sinks", {}),
    ("window, both sides", "ordered", "slopes", "", {}),
    ("sinks and window", "ordered", "none", "cap", {}),
    ("sinks and window", "cached keys", "buckets", "", {}),
]


@pytest.mark.ledger("flash.tiled", "flash.exact", "flash.backward")
@pytest.mark.parametrize(("mask", "kind", "bias", "extra", "sizes"), CASES)
def test_triton_equals_the_reference(mask: str, kind: str, bias: str, extra: str, sizes: dict[str, int]) -> None:
    layout = token_layout(kind)
    assert largest_error(inputs(layout, **sizes), layout, options_of(mask, bias, extra)) < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ordered", "packed", "padded left", "cached keys"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_and_layout_equals_the_reference(mask: str, kind: str) -> None:
    draw = random.Random(f"{mask} {kind}")
    layout = token_layout(kind, draw.choice([32, 37, 48]))
    bias, extra = draw.choice(["none", "slopes", "buckets"]), draw.choice(["", "cap", "sinks", "cap, sinks"])
    options = options_of(mask, bias, extra)
    sizes = {"kv_heads": draw.choice([1, 2]), "dim": draw.choice([16, 20]), "value_dim": draw.choice([16, 8])}
    assert largest_error(inputs(layout, **sizes), layout, options) < 3e-6


def test_half_precision_error_is_at_rounding_level() -> None:
    layout = token_layout("ordered", 32)
    tensors, options = inputs(layout, dtype=torch.float16), options_of("causal", "none", "")
    assert largest_error(tensors, layout, options) < 2e-3


@pytest.mark.parametrize("extra", ["", "sinks"])
def test_query_without_keys_is_zero_with_finite_gradients(extra: str) -> None:
    slots = torch.arange(20, device=DEVICE).expand(2, 20)
    layout = TokenLayout(slots, valid=torch.stack([slots[0] < 0, slots[1] >= 3]), consecutive=True)
    tensors = inputs(layout)
    out = triton.attend(*tensors, layout, options_of("causal", "none", extra))
    assert not out[0].any()
    assert not out[1, :, :3].any()
    gradients = torch.autograd.grad(out.square().sum(), tensors)
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][0].any()


@pytest.mark.parametrize(
    ("mask", "kind", "bias", "extra"),
    [
        ("causal", "ordered", "slopes", "sinks"),
        ("window", "packed", "none", "cap"),
        ("full", "cached keys", "none", ""),
    ],
)
def test_attend_with_statistics_equals_the_version_in_pytorch(mask: str, kind: str, bias: str, extra: str) -> None:
    layout, options = token_layout(kind), options_of(mask, bias, extra)
    q, k, v = inputs(layout)
    out, found = triton.attend_with_statistics(q, k, v, layout, options, first_tokens=2)
    expected_out, expected = attend_with_statistics(q.double(), k.double(), v.double(), layout, options, first_tokens=2)
    assert (out - expected_out).abs().max() < 1e-5
    for name in ("entropy", "first_weight", "top_weight", "log_sum"):
        assert (getattr(found, name) - getattr(expected, name)).abs().max() < 1e-4, name
    assert torch.equal(found.top_key, expected.top_key)


def check_bounds(mask: str, tokens: list[Tensor], consecutive: bool) -> Tensor:
    """Asserts that no pair outside the bounds is allowed, and that every pair inside the inner bounds is allowed.

    Returns the bounds of the keys of each tile of queries.
    """
    q_positions, k_positions, q_document, k_document = tokens
    pairs_allowed = q_document.unsqueeze(2) == k_document.unsqueeze(1)
    allowed = MASKS[mask].allows(q_positions.unsqueeze(2), k_positions.unsqueeze(1))
    pairs_allowed = pairs_allowed if allowed is None else pairs_allowed & allowed
    limits = triton.mask_limits(MASKS[mask])
    assert limits is not None
    found = bounds(q_positions, k_positions, q_document, k_document, limits, 8, consecutive)
    for pairs, spans in zip((pairs_allowed, pairs_allowed.mT), found, strict=True):
        for b, row in ((b, row) for b in range(2) for row in range(spans.shape[1])):
            lo, full_lo, full_hi, hi = spans[b, row].tolist()
            tile_pairs = pairs[b, 8 * row : 8 * row + 8]
            assert lo <= full_lo <= full_hi <= hi <= pairs.shape[2]
            assert not tile_pairs[:, :lo].any()
            assert not tile_pairs[:, hi:].any()
            assert tile_pairs[:, full_lo:full_hi].all()
    return found[0]


@pytest.mark.parametrize("mask", MASKS)
def test_bounds_contain_all_allowed_pairs(mask: str) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        tokens = [torch.randint(0, high, (2, n)) for high in (40, 3) for n in (29, 45)]
        if seed % 2:
            tokens = [x.sort().values for x in tokens]
        tokens[3] = tokens[3].where(torch.rand(2, 45) < 0.9, NO_DOCUMENT)
        check_bounds(mask, tokens, False)


@pytest.mark.parametrize("mask", MASKS)
def test_bounds_of_packed_rows_are_tight(mask: str) -> None:
    slots = torch.arange(45).expand(2, 45)
    documents = torch.stack([slots[0] // 13, (slots[1] >= 30).long()])
    positions = slots - torch.stack([documents[0] * 13, documents[1] * 30])
    spans = check_bounds(mask, [positions, positions, documents, documents.where(slots != 44, NO_DOCUMENT)], True)
    if MASKS[mask].causal:
        assert (spans[..., 3] <= torch.arange(8, 56, 8)).all()  # no tile of later keys
    assert spans[1, 5, 0] >= 24  # no key of the previous document


def test_unsupported_arguments_are_refused_with_the_reason() -> None:
    layout = token_layout("ordered")
    q, k, v = inputs(layout)
    slopes = Slopes(torch.ones(2, requires_grad=True))
    causal = ScoreOptions(Causal())
    for tensors, options, reason in [
        ((q.double(), k.double(), v.double()), causal, "in one dtype, half precision or float32, not torch.float64"),
        ((q, k, v.half()), causal, "needs q, k and v in one dtype"),
        ((q, k, v.repeat(1, 1, 1, 20)), causal, "a head_dim of up to 128"),
        ((q, k, v[..., :6]), causal, "in multiples of 4, not (16, 6)"),
        ((q, k, v), ScoreOptions(StridedPattern(4)), "does not support the mask Strided"),
        ((q, k, v), ScoreOptions(Causal(), bias=slopes), "no gradient for slopes"),
        ((q, k, v), ScoreOptions(Causal(), bias=Bias()), "does not support the bias Bias"),
        ((q, k, v), ScoreOptions(Causal(), scale=-1.0), "a positive scale"),
        ((q, k, v), ScoreOptions(Causal(), dropout=0.1), "has no dropout"),
    ]:
        assert reason in (triton.unsupported_by_kernel(describe(*tensors, layout, options)) or "")


def test_whole_sequences_without_options_are_left_to_pytorch() -> None:
    whole, packed = token_layout("ordered"), token_layout("packed")
    x = inputs(whole, dtype=torch.float16)
    assert "PyTorch's kernels are faster" in (triton.slower_reason(describe(*x, whole, ScoreOptions(Causal()))) or "")
    for layout, options in [
        (packed, ScoreOptions(Causal())),
        (whole, ScoreOptions(Window(4))),
        (whole, ScoreOptions(Full(), softcap=2.0)),
    ]:
        assert triton.slower_reason(describe(*x, layout, options)) is None
    few_queries = token_layout("cached keys")
    assert "only 9 queries per row" in (
        triton.slower_reason(describe(*inputs(few_queries), few_queries, ScoreOptions(Causal()))) or ""
    )
