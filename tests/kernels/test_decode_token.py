"""A decode step of attention in one kernel equals rotation, append and attention in float64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE

SCALE, EPS = 0.2, 1e-6
CASES = {  # heads, kv heads, head dim, slots per page, cached tokens of each row, earlier tokens in the window
    "grouped": (4, 2, 32, 4, (0, 17, 600), -1),
    "multi-query": (3, 1, 64, 16, (5, 1100), -1),
    "window": (2, 2, 32, 16, (3, 40, 700), 37),
    "ring": (2, 2, 32, 39, (3, 40, 700), 37),  # one page per row, in which positions wrap around
}


def normalized(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None or sin is None:
        return x
    (a, b), cos, sin = x.chunk(2, -1), cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("norm, rotate", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("case", CASES)
def test_equals_rotation_append_and_attention(case: str, norm: bool, rotate: bool, splits: int) -> None:
    from regard.kernels.attention.triton.decode_token import decode_token

    heads, kv_heads, dim, page, lengths, before = CASES[case]
    torch.manual_seed(0)
    batch, pages = len(lengths) + 1, 1 if case == "ring" else 1200 // page  # the last row is not valid
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim)
    pools = torch.randn(2, batch * pages * page, kv_heads, dim)
    table = torch.randperm(batch * pages).view(batch, pages)
    angles = 6 * torch.rand(batch, dim // 2)
    angle_tensors = (angles.cos(), angles.sin()) if rotate else (None, None)
    norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if norm else (None, None)
    positions, valid = torch.tensor([*lengths, 9]), torch.tensor([True] * len(lengths) + [False])

    cos, sin, q_norm, k_norm = (None if t is None else t.double() for t in (*angle_tensors, *norms))
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.double().split([n * dim for n in (heads, kv_heads, kv_heads)], 1))
    q, k = rotated(normalized(q, q_norm), cos, sin), rotated(normalized(k, k_norm), cos, sin)
    expected_pools, expected = pools.double(), torch.zeros(batch, heads * dim, dtype=torch.float64)
    for b, length in enumerate(lengths):
        slots = (table[b].unsqueeze(1) * page + torch.arange(page)).flatten()
        slots = slots[torch.arange(length + 1) % len(slots)]
        expected_pools[0, slots[-1]], expected_pools[1, slots[-1]] = k[b], v[b]
        if before >= 0:
            slots = slots[max(0, length - before) :]
        keys, values = (x[slots].repeat_interleave(heads // kv_heads, 1) for x in expected_pools)
        weights = (torch.einsum("he,she->hs", q[b], keys) * SCALE).softmax(-1)
        expected[b] = torch.einsum("hs,she->he", weights, values).flatten()

    arguments = [None if t is None else t.to(DEVICE) for t in (qkv, *angle_tensors, *norms, *pools, table)]
    qkv, cos, sin, q_norm, k_norm, k_pool, v_pool, table = arguments
    for _ in range(2):  # the first launch resets its counters; the second writes the same token again
        out = decode_token(
            qkv, cos, sin, q_norm, k_norm, EPS, k_pool, v_pool, table, page, positions.to(DEVICE), valid.to(DEVICE),
            SCALE, before, block=32, splits=splits,
        )  # fmt: skip
        assert (out.cpu() - expected).abs().max() <= 1e-5
    assert (torch.stack([k_pool, v_pool]).cpu() - expected_pools).abs().max() <= 1e-5
