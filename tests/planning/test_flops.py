"""Pairs and FLOPs by length: closed forms against direct counts, their growth, and the reach of windows."""

import math

import pytest
import torch

from regard.kernels.attention import ring_attention
from regard.kernels.attention.mask import Causal, Full
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.sparse_transformer import StridedPattern
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.recurrent import LSTM
from regard.planning import groups, plan
from regard.planning.flops import (
    cached_pairs,
    causal_pairs,
    decode_pairs,
    full_pairs,
    linear_crossover,
    mask_pairs,
    pair_flops,
    uncached_pairs,
    uncached_projections,
    window_pairs,
    window_reach,
)
from regard.planning.memory import standard_traffic, tiled_traffic

LENGTHS = (1024, 2048, 4096)


def slope(cost, lengths=LENGTHS) -> float:
    """The exponent of a cost, from the last two lengths."""
    shorter, longer = lengths[-2:]
    return math.log(cost(longer) / cost(shorter)) / math.log(longer / shorter)


def decoder(mixer, context: int = 4096) -> Decoder:
    return Decoder(32, 64, (Repeat((Block((Sublayer(mixer),)),), 2),), context=context)


@pytest.mark.ledger("calc.window")
@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_pairs_equal_a_direct_count(length, window):
    pairs = [(i, j) for i in range(length) for j in range(length)]
    assert full_pairs(length) == len(pairs)
    assert causal_pairs(length) == sum(j <= i for i, j in pairs)
    assert window_pairs(length, window) == sum(0 <= i - j < window for i, j in pairs)


@pytest.mark.ledger("sp.window.cost", "calc.window")
def test_a_window_of_4096_saves_a_factor_of_24_in_100_000_tokens():
    length, window = 100_000, 4096
    assert full_pairs(length) == 10**10 and length * window == 409_600_000
    assert round(full_pairs(length) / (length * window), 1) == 24.4
    assert round(causal_pairs(length) / window_pairs(length, window), 1) == 12.5  # relative to causal attention


@pytest.mark.ledger("calc.window")
def test_reach_of_stacked_windows_counts_the_token_itself():
    assert window_reach(32, 4096) == 131_041
    assert window_reach(1, 4096) == 4096 and window_reach(4, 1) == 1
    reached = {0}  # each layer extends it
    for _ in range(4):
        reached = {i + j for i in reached for j in range(3)}
    assert len(reached) == window_reach(4, 3) == 9


@pytest.mark.ledger("sp.sizes")
def test_a_million_tokens_have_a_trillion_pairs():
    assert full_pairs(10**6) == 10**12
    assert pair_flops(full_pairs(10**6), 128) == 512 * 10**12
    assert pair_flops(causal_pairs(10**6), 128) == pytest.approx(256e12, rel=1e-5)
    assert pair_flops(10, head_dim=3, value_dim=5) == 10 * 2 * (3 + 5)


@pytest.mark.ledger("lin.cost")
@pytest.mark.parametrize("features", [64, 128])
def test_linear_attention_is_cheaper_if_the_sequence_is_longer_than_its_features(features):
    assert linear_crossover(features, head_dim=128) == features
    length = features + 1
    assert pair_flops(length, 128) > 4 * features * 128 >= pair_flops(features, 128)


@pytest.mark.ledger("kv.total")
@pytest.mark.parametrize("length", [1, 2, 10, 1000])
def test_pairs_of_generation_equal_the_sum_over_steps(length):
    steps = range(1, length + 1)
    assert cached_pairs(length) == sum(steps)
    assert uncached_pairs(length) == sum(step * step for step in steps)
    assert uncached_projections(length) == sum(steps)


@pytest.mark.ledger("kv.total", "inf.total")
def test_a_cache_avoids_most_pairs_of_a_long_generation():
    assert (uncached_pairs(1000), cached_pairs(1000)) == (333_833_500, 500_500)
    assert decode_pairs(1000, 10_000) == 60_005_000 == sum(1000 + t for t in range(1, 10_001))
    assert cached_pairs(11_000) - cached_pairs(1000) == decode_pairs(1000, 10_000)
    planned = plan(decoder(Attention(8)), context=11_000)
    layers, width = 2, planned.spec.width
    assert planned.kv_bytes() == 2 * 11_000 * layers * width * 4  # keys and values in float32: (n + T) · L · d


@pytest.mark.ledger("eff.table")
def test_costs_of_attention_grow_with_the_stated_exponents():
    head_dim, window = 64, 128
    assert slope(lambda n: mask_pairs(Full(), n)) == 2
    assert slope(lambda n: mask_pairs(Causal(), n)) == pytest.approx(2, abs=0.01)
    assert slope(lambda n: mask_pairs(Window(window), n)) == pytest.approx(1, abs=0.05)
    assert slope(lambda n: mask_pairs(StridedPattern(math.isqrt(n)), n), (1024, 4096)) == pytest.approx(1.5, abs=0.05)
    linear, grouped, full = LinearAttention(heads=8), Attention(8, 2, mask=Full()), Attention(8, mask=Full())
    assert slope(lambda n: linear.flops(512, n, n)) == pytest.approx(1, abs=0.01)
    for n in LENGTHS:  # grouped heads save the projections of six key and six value heads, and no scores
        assert full.flops(512, n, n) - grouped.flops(512, n, n) == 2 * (2 * n * 512 * 6 * 64)
        assert grouped.flops(512, n, n) - n * grouped.flops(512, 1, 0) == pair_flops(n**2, 512)
    assert slope(lambda n: standard_traffic(n, head_dim)) == pytest.approx(2, abs=0.1)
    assert slope(lambda n: tiled_traffic(n, head_dim, 2**16)) == pytest.approx(2, abs=0.1)
    for devices in (1, 2, 4):  # ring attention divides the pairs equally
        pairs = {int((positions + 1).sum()) for positions in ring_attention.zigzag_shares(4096, devices)}
        assert {devices * share for share in pairs} == {causal_pairs(4096)}


@pytest.mark.parametrize(
    "mask",
    [Window(3), Window(3, causal=False), Dilated(3, 2), Dilated(3, 2, causal=False), SinksAndWindow(2, 3),
     Longformer(3, 2, causal=True), Causal(), Full(), Longformer(3, 2)],
)  # fmt: skip
def test_max_keys_is_the_most_keys_that_any_query_attends_to(mask):
    positions = torch.arange(50)
    allowed = mask.allows(positions.unsqueeze(-1), positions)
    max_keys = 50 if allowed is None else int(allowed.sum(-1).max())
    assert max_keys == (50 if mask.max_keys is None else mask.max_keys)


@pytest.mark.ledger("calc.window", "sp.window.cost")
def test_a_window_bounds_pairs_flops_and_cache():
    context, size = 4096, 256
    windowed, full = plan(decoder(Attention(2, mask=Window(size)))), plan(decoder(Attention(2)))
    numbers = groups(windowed)["window_of_256"]
    assert numbers["pairs"] == window_pairs(context, size) == mask_pairs(Window(size), context)
    assert numbers["reach"] == 2 * (size - 1) + 1
    assert numbers["times_fewer_than_causal"] == causal_pairs(context) / window_pairs(context, size)
    assert full.decode_flops - windowed.decode_flops == 2 * 4 * 64 * (context - size)
    assert windowed.kv_bytes() * context == full.kv_bytes() * size
    assert full.kv_bytes() == full.kv_bytes(ring=False) == windowed.kv_bytes(ring=False)
    sinks = plan(decoder(Attention(2, mask=SinksAndWindow(4, size))))
    assert sinks.kv_bytes() * size == windowed.kv_bytes() * (size + 4)


@pytest.mark.ledger("calc.crossover", "lin.cost")
def test_linear_attention_decodes_cheaper_if_the_context_is_longer_than_its_head_dim():
    width, heads = 512, 4

    def costs(length: int) -> tuple[int, int]:
        return tuple(mixer(heads).flops(width, 1, length) for mixer in (Attention, LinearAttention))

    full, linear = costs(128)
    assert full < linear
    full, linear = costs(128 + 3)  # the state has one more column, for the sum, and a token attends to itself
    assert full > linear


@pytest.mark.ledger("sp.window.depth")
@pytest.mark.parametrize("layers, size", [(1, 3), (2, 3), (4, 3), (3, 5)])
def test_gradients_reach_exactly_as_far_as_stacked_windows(layers, size):
    length = 24
    block = Block((Sublayer(Attention(2, mask=Window(size))),))
    model = Decoder(8, 16, (Repeat((block,), layers),), context=length).build(seed=0).double()
    x = torch.randn(1, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    model.stack(x, TokenLayout.whole(1, length))[0][0, -1].sum().backward()
    reached = x.grad[0].abs().sum(-1) > 0
    assert reached.nonzero().flatten().tolist() == list(range(length - window_reach(layers, size), length))


@pytest.mark.ledger("sp.window.depth")
def test_32_windowed_layers_reach_131_041_tokens():
    assert window_reach(32, 4096) == 131_041 < 32 * 4096
    assert window_reach(32, 4097) == 32 * 4096 + 1  # a window of 4096 tokens and the token itself


def test_bodies_without_a_mask_have_no_window():
    assert "window" not in " ".join(groups(plan(decoder(SwiGLU(40)))))


@pytest.mark.ledger("attn.notcheaper", exact=True)
@pytest.mark.parametrize("width", [64, 512])
def test_a_block_takes_more_flops_per_token_than_an_lstm_but_no_serial_steps(width):
    block = (Attention(8), FeedForward(4 * width))
    for keys in (1, 128, 4096):
        assert LSTM().flops(width, 1, keys) == 16 * width**2
        assert sum(body.flops(width, 1, keys) for body in block) == 24 * width**2 + 4 * keys * width

    def calls(body, projection: str, length: int) -> int:
        """How often a forward multiplies by the matrix: once per step if a step needs the one before."""
        module, count = body.build(8), []
        module.get_submodule(projection).register_forward_hook(lambda *_: count.append(1))
        module(torch.randn(1, length, 8), TokenLayout.whole(1, length))
        return len(count)

    for length in (2, 7, 30):
        assert calls(LSTM(), "recurrence.h_proj", length) == length
        assert calls(Attention(2), "k_proj", length) == 1


@pytest.mark.ledger("attn.notcheaper", exact=True)
def test_attention_links_any_two_tokens_by_one_layer_and_a_recurrence_by_as_many_steps_as_lie_between():
    """The gradient of the last output with respect to the first input, of new modules with the same seed."""

    def link(body, length: int) -> float:
        torch.manual_seed(0)
        module, x = body.build(16).double(), torch.randn(1, length, 16, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(module(x, TokenLayout.whole(1, length))[0, -1].sum(), x)[0][0, 0].norm().item()

    assert link(Attention(2), 512) > 1e-2 * link(Attention(2), 8) > 0  # the weight of one of n keys: about 1 / n
    assert link(LSTM(), 512) < 1e-20 * link(LSTM(), 8)
