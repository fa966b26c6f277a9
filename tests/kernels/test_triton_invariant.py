"""Batch-invariant kernels equal float64; on a GPU, the result for a token does not depend on the tokens beside it."""

import pytest
import torch
from torch import Tensor

from tests.kernels.linear_reference import EPS, compute, draw
from tests.kernels.triton_device import DEVICE

SCALE = 0.2
ROWS = (1, 2, 5, 17, 33, 64, 200, 1000)
GPU_CASES = {  # heads, kv heads, head dim, earlier tokens in the window
    "llama": (32, 8, 128, -1),
    "window": (8, 2, 64, 300),
    "multi-query": (71, 1, 64, -1),
    "wide": (6, 2, 256, -1),
}


@pytest.mark.parametrize("tokens, splits, act", [(1, 1, None), (17, 3, None), (70, 1, "silu"), (70, 3, None)])
def test_linear_layers_of_any_number_of_tokens(tokens: int, splits: int, act: str | None) -> None:
    from regard.kernels.triton_decode_linear import Tiles
    from regard.kernels.triton_invariant_linear import invariant_linear

    x, weight, norm, bias, residual = draw(tokens, act, (True,) * 3, torch.float32)
    exact = compute(*(t.double() for t in (x, weight, norm, bias, residual)), act)
    y = invariant_linear(x, weight, norm, EPS, bias, residual, act, Tiles(64, 64, 4, 2, splits))
    assert (y - exact).abs().max() <= 1e-5


def draw_cache(
    heads: int, kv_heads: int, dim: int, page: int, batch: int, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of whole rows (B, L, H, E), pools of keys and values, and the pages of the rows, in a random order."""
    torch.manual_seed(0)
    pages = -(-length // page)
    q = torch.randn(batch, length, heads, dim)
    k, v = torch.randn(2, batch * pages * page, kv_heads, dim)
    table = torch.randperm(batch * pages).view(batch, pages)
    return q.to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype), table.to(DEVICE)


def attend_rows(
    cache: tuple[Tensor, ...], page: int, starts: list[int], counts: list[int], before: int, programs: int | None = None
) -> Tensor:
    """The outputs (B, L, H · E) of a chunk of each row."""
    from regard.kernels.attention.triton.invariant import attend_invariant

    q, k, v, table = cache
    offsets = torch.tensor(starts).unsqueeze(1) + torch.arange(max(counts))
    positions = offsets.where(torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1), 0).to(DEVICE)
    chunks = torch.stack([row[index] for row, index in zip(q, positions, strict=True)])
    sizes = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    return attend_invariant(chunks, k, v, table, page, positions, sizes, SCALE, before, programs=programs)


def expected_rows(
    cache: tuple[Tensor, ...], page: int, before: int, dtype: torch.dtype = torch.float64, length: int | None = None
) -> Tensor:
    """The first outputs (B, L, H · E) in plain torch, by default all of them."""
    q, k, v, table = (cache[0][:, :length], *cache[1:])
    slots = (table.unsqueeze(-1) * page + torch.arange(page, device=DEVICE)).flatten(1)[:, : q.shape[1]]
    keys, values = (x.to(dtype)[slots].repeat_interleave(q.shape[2] // k.shape[1], 2) for x in (k, v))
    distance = torch.arange(q.shape[1], device=DEVICE).unsqueeze(1) - torch.arange(q.shape[1], device=DEVICE)
    masked = (distance < 0) | (distance > (before if before >= 0 else q.shape[1]))
    scores = (torch.einsum("blhe,bshe->bhls", q.to(dtype), keys) * SCALE).masked_fill(masked, -torch.inf)
    return torch.einsum("bhls,bshe->blhe", scores.softmax(-1), values).flatten(2)


@pytest.mark.parametrize("heads, kv_heads, page, before", [(4, 2, 4, -1), (3, 1, 16, -1), (2, 2, 16, 37)])
def test_attention_of_chunks_and_of_decode_steps(heads: int, kv_heads: int, page: int, before: int) -> None:
    """Decode steps are bitwise the same: tiles have one size in every chunk, so the interpreter rounds alike too."""
    cache = draw_cache(heads, kv_heads, 32, page, 3, 600, torch.float32)
    starts, counts = [0, 500, 31], [5, 19, 33]
    chunk, expected = attend_rows(cache, page, starts, counts, before), expected_rows(cache, page, before)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert (chunk[b, :count] - expected[b, start : start + count]).abs().max() <= 1e-5
    for offsets, programs in (([4, 17, 0], 2), ([3, 13, 32], 1)):
        steps = attend_rows(
            cache, page, [a + b for a, b in zip(starts, offsets, strict=True)], [1] * 3, before, programs
        )
        assert torch.equal(steps[:, 0], chunk[range(3), offsets])


@pytest.mark.gpu
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("outputs, columns", [(1024, 1024), (2048, 3072), (1000, 1544), (4096, 14336), (40000, 512)])
def test_a_row_of_a_linear_layer_is_bitwise_the_same_alone(outputs: int, columns: int, act: str | None) -> None:
    from regard.kernels.triton_invariant_linear import invariant_linear

    x, weight, norm, bias, residual = draw(max(ROWS), act, (True,) * 3, torch.bfloat16, outputs, columns)
    whole = invariant_linear(x, weight, norm, EPS, bias, residual, act)
    for tokens in ROWS:
        start = max(ROWS) - tokens
        some = invariant_linear(x[start:], weight, norm, EPS, bias, residual[start:], act)
        assert torch.equal(some, whole[start:]), tokens
    for i in (0, 1, 31, 63, 64, 127, 128, 500, 999):
        assert torch.equal(
            invariant_linear(x[i : i + 1], weight, norm, EPS, bias, residual[i : i + 1], act)[0], whole[i]
        )
    exact = compute(*(t.double() for t in (x, weight, norm, bias, residual)), act)
    errors = [(y - exact).abs().max() for y in (whole, compute(x, weight, norm, bias, residual, act))]
    assert errors[0] <= 2 * errors[1] + torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_a_query_is_bitwise_the_same_in_a_prompt_and_in_decode_steps(case: str) -> None:
    heads, kv_heads, dim, before = GPU_CASES[case]
    page, length = 16, 5000  # more than SPLIT · MAX_SPLITS, from which on splits grow
    cache = draw_cache(heads, kv_heads, dim, page, 2, length, torch.bfloat16)
    whole = attend_rows(cache, page, [0, 0], [length, length], before)
    exact, plain = (expected_rows(cache, page, before, dtype, 512) for dtype in (torch.float64, torch.bfloat16))
    errors = [(y - exact).abs().max() for y in (whole[:, :512], plain)]
    assert errors[0] <= 2 * errors[1] + torch.finfo(torch.bfloat16).eps
    for starts, counts in [
        ([0, 1], [1, 70]),
        ([255, 256], [300, 2]),
        ([4090, 4999], [20, 1]),
        ([1111, 2048], [64, 64]),
    ]:
        chunk = attend_rows(cache, page, starts, counts, before)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            assert torch.equal(chunk[b, :count], whole[b, start : start + count]), (starts, counts)
    for position in (0, 15, 16, 255, 256, 1023, 1024, 4095, 4096, 4097, 4999):
        for programs in (1, 3, 16):
            token = attend_rows(cache, page, [position, 9], [1, 1], before, programs)
            assert torch.equal(token[0, 0], whole[0, position]) and torch.equal(token[1, 0], whole[1, 9]), position
