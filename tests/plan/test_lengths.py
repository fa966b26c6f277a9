"""What grows with length: pairs, windows, tiles, generation. Each closed form against a plain count."""

import math

import pytest

from regard.plan.attention import (
    causal_pairs,
    full_pairs,
    linear_crossover,
    pair_flops,
    score_bytes,
    window_pairs,
    window_reach,
)
from regard.plan.devices import DEVICES, device
from regard.plan.flash import standard_traffic, tile_rows, tiled_traffic
from regard.plan.generation import cached_pairs, decode_pairs, uncached_pairs, uncached_projections


@pytest.mark.ledger("calc.window")
@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_pairs_are_those_of_the_masks(length, window):
    pairs = [(i, j) for i in range(length) for j in range(length)]
    assert full_pairs(length) == len(pairs)
    assert causal_pairs(length) == sum(j <= i for i, j in pairs)
    assert window_pairs(length, window) == sum(0 <= i - j < window for i, j in pairs)


@pytest.mark.ledger("sp.window.cost", "calc.window")
def test_a_window_of_4096_in_100_000_tokens():
    length, window = 100_000, 4096
    assert full_pairs(length) == 10**10 and length * window == 409_600_000
    assert round(full_pairs(length) / (length * window), 1) == 24.4
    assert round(causal_pairs(length) / window_pairs(length, window), 1) == 12.5  # of what causal attention computes


@pytest.mark.ledger("calc.window")
def test_reach_of_stacked_windows_counts_the_token_itself():
    assert window_reach(32, 4096) == 131_041
    assert window_reach(1, 4096) == 4096 and window_reach(4, 1) == 1
    seen = {0}  # layer by layer, by hand
    for _ in range(4):
        seen = {i + j for i in seen for j in range(3)}
    assert len(seen) == window_reach(4, 3) == 9


@pytest.mark.ledger("sp.sizes")
def test_a_million_tokens_are_pairs_and_flops():
    assert full_pairs(10**6) == 10**12
    assert pair_flops(full_pairs(10**6), 128) == 512 * 10**12
    assert pair_flops(causal_pairs(10**6), 128) == pytest.approx(256e12, rel=1e-5)
    assert pair_flops(10, head_dim=3, value_dim=5) == 10 * 2 * (3 + 5)


@pytest.mark.ledger("flash.sizes", "calc.flash")
def test_scores_written_down():
    assert score_bytes(131_072) == 34_359_738_368 == 32 * 2**30  # one head of one layer, FP16
    assert score_bytes(100_000) == 20 * 10**9
    assert score_bytes(100_000, heads=32) == 640 * 10**9


@pytest.mark.ledger("lin.cost")
@pytest.mark.parametrize("features", [64, 128])
def test_linear_attention_is_cheaper_beyond_its_features(features):
    assert linear_crossover(features, head_dim=128) == features
    length = features + 1
    assert pair_flops(length, 128) > 4 * features * 128 >= pair_flops(features, 128)


def simulated_traffic(length: int, head_dim: int, fast: int) -> tuple[int, int]:
    """(numbers moved, most held at once) by the tiled loops, tile by tile."""
    rows = tile_rows(fast, head_dim)
    moved = most = 0
    for start in range(0, length, rows):
        queries = min(rows, length - start)
        moved += queries * head_dim  # Q in
        for other in range(0, length, rows):
            keys = min(rows, length - other)
            moved += 2 * keys * head_dim  # K and V in
            most = max(most, 2 * queries * head_dim + 2 * keys * head_dim)
        moved += queries * head_dim  # O out
    return moved, most


@pytest.mark.ledger("flash.io", "calc.flash")
@pytest.mark.parametrize("length", [1, 100, 512, 1000])
@pytest.mark.parametrize("head_dim, fast", [(8, 1024), (64, 4096), (64, 100_000), (128, 513)])
def test_tiled_traffic_is_that_of_the_loops(length, head_dim, fast):
    moved, most = simulated_traffic(length, head_dim, fast)
    assert moved == tiled_traffic(length, head_dim, fast)
    assert most <= fast


@pytest.mark.ledger("flash.io", "calc.flash")
def test_tiles_save_traffic_until_the_heads_are_too_wide():
    length, head_dim = 65_536, 128
    fast = DEVICES["h100"].usable // 2  # numbers of 16 bits
    gain = standard_traffic(length, head_dim) / tiled_traffic(length, head_dim, fast)
    assert gain == pytest.approx(fast / (2 * head_dim**2), rel=0.05)
    for wide in (64, 128, 256):
        fast = wide**2 - 1  # E² > M
        assert tiled_traffic(length, wide, fast) > standard_traffic(length, wide)
    slope = math.log2(tiled_traffic(2 * length, 64, 2**15) / tiled_traffic(length, 64, 2**15))
    assert slope == pytest.approx(2, abs=0.01)  # traffic is saved by a factor, not by an order
    with pytest.raises(ValueError, match="at least 512"):
        tiled_traffic(10, 128, 511)


@pytest.mark.ledger("flash.sram")
def test_fast_memory_of_a_multiprocessor():
    assert DEVICES["a100"].fast == 192 * 1024
    assert (DEVICES["h100"].fast, DEVICES["h100"].usable) == (256 * 1024, 227 * 1024)
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        device("h10")


@pytest.mark.ledger("kv.total")
@pytest.mark.parametrize("length", [1, 2, 10, 1000])
def test_pairs_of_a_generation_step_by_step(length):
    steps = range(1, length + 1)
    assert cached_pairs(length) == sum(steps)
    assert uncached_pairs(length) == sum(step * step for step in steps)
    assert uncached_projections(length) == sum(steps)


@pytest.mark.ledger("kv.total", "inf.total")
def test_pairs_of_long_generations():
    assert (uncached_pairs(1000), cached_pairs(1000)) == (333_833_500, 500_500)
    assert decode_pairs(1000, 10_000) == 60_005_000 == sum(1000 + t for t in range(1, 10_001))
    assert cached_pairs(11_000) - cached_pairs(1000) == decode_pairs(1000, 10_000)
