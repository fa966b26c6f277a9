"""How costs grow: counters of each part against their orders, and how far windows reach."""

import math
from itertools import pairwise

import pytest
import torch

from regard.kernels.attention.mask import Causal, Full
from regard.kernels.attention.patterns.sinks import SinksAndWindow
from regard.kernels.attention.patterns.sparse_transformer import StridedPattern
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention, use_backend
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.plan import groups, plan
from regard.plan.activations import kept_bytes
from regard.plan.attention import causal_pairs, mask_pairs, pair_flops, window_pairs, window_reach
from regard.plan.flash import standard_traffic, tiled_traffic

LENGTHS = (1024, 2048, 4096)


def slope(cost, lengths=LENGTHS) -> float:
    """The exponent of a cost, from its last doubling."""
    shorter, longer = lengths[-2:]
    return math.log(cost(longer) / cost(shorter)) / math.log(longer / shorter)


def layer(mixer, heads_context: int = 4096) -> Decoder:
    return Decoder(32, 64, (Repeat((Block((Sublayer(mixer),)),), 2),), context=heads_context)


@pytest.mark.ledger("eff.table")
def test_every_kind_of_attention_grows_as_the_table_says():
    head_dim, window = 64, 128
    assert slope(lambda n: mask_pairs(Full(), n)) == 2
    assert slope(lambda n: mask_pairs(Causal(), n)) == pytest.approx(2, abs=0.01)
    assert slope(lambda n: mask_pairs(Window(window), n)) == pytest.approx(1, abs=0.05)
    assert slope(lambda n: mask_pairs(StridedPattern(math.isqrt(n)), n), (1024, 4096)) == pytest.approx(1.5, abs=0.05)
    linear = LinearAttention(heads=8)
    assert slope(lambda n: linear.flops(512, n, n)) == pytest.approx(1, abs=0.01)
    assert slope(lambda n: standard_traffic(n, head_dim)) == pytest.approx(2, abs=0.1)
    assert slope(lambda n: tiled_traffic(n, head_dim, 2**16)) == pytest.approx(2, abs=0.1)
    spread = [pair_flops(4096**2, head_dim) / devices for devices in (1, 2, 4)]  # ring attention: the same, shared
    assert all(more == 2 * fewer for more, fewer in pairwise(spread))


@pytest.mark.ledger("eff.table")
def test_memory_of_attention_grows_as_the_table_says():
    """Scores written down are n²; tiles keep one number a row; a linear state does not grow at all."""

    def kept(mixer, backend: str, length: int) -> int:
        model = layer(mixer, length).build(seed=0)
        use_backend(model, backend)
        return kept_bytes(model, torch.zeros(1, length, dtype=torch.long))

    written, tiled = (lambda n, b=b: kept(Attention(2), b, n) for b in ("reference", "sdpa"))
    assert slope(written, (512, 1024)) > 1.7
    assert slope(tiled, (512, 1024)) == pytest.approx(1, abs=0.01)
    states = [plan(layer(LinearAttention(heads=2), n)).state_bytes for n in LENGTHS]
    assert len(set(states)) == 1 and states[0] == 2 * (2 * 32 * (32 + 1)) * 4  # layers · heads · r(d_v + 1)


@pytest.mark.ledger("calc.window", "sp.window.cost")
def test_a_window_is_planned_as_a_window():
    context, size = 4096, 256
    windowed, full = plan(layer(Attention(2, mask=Window(size)))), plan(layer(Attention(2)))
    numbers = groups(windowed)["window_of_256"]
    assert numbers["pairs"] == window_pairs(context, size) == mask_pairs(Window(size), context)
    assert numbers["reach"] == 2 * (size - 1) + 1
    assert numbers["times_fewer_than_causal"] == causal_pairs(context) / window_pairs(context, size)
    assert full.decode_flops - windowed.decode_flops == 2 * 4 * 64 * (context - size)
    assert windowed.kv_bytes() * context == full.kv_bytes() * size
    assert full.kv_bytes() == full.kv_bytes(ring=False) == windowed.kv_bytes(ring=False)
    sinks = plan(layer(Attention(2, mask=SinksAndWindow(4, size))))
    assert sinks.kv_bytes() * size == windowed.kv_bytes() * (size + 4)


@pytest.mark.ledger("calc.crossover", "lin.cost")
def test_linear_attention_is_cheaper_to_decode_beyond_its_head_dim():
    width, heads = 512, 4  # the state has one column more, for the sum, and a token one pair with itself

    def costs(length: int) -> tuple[int, int]:
        return tuple(mixer(heads).flops(width, 1, length) for mixer in (Attention, LinearAttention))

    full, linear = costs(128)
    assert full < linear
    full, linear = costs(128 + 3)
    assert full > linear


@pytest.mark.ledger("sp.window.depth")
@pytest.mark.parametrize("layers, size", [(1, 3), (2, 3), (4, 3), (3, 5)])
def test_influence_reaches_as_far_as_stacked_windows_and_no_further(layers, size):
    length = 24
    block = Block((Sublayer(Attention(2, mask=Window(size))),))
    model = Decoder(8, 16, (Repeat((block,), layers),), context=length).build(seed=0).double()
    x = torch.randn(1, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    model.stack(x, TokenLayout.whole(1, length))[0][0, -1].sum().backward()
    reached = x.grad[0].abs().sum(-1) > 0
    assert reached.nonzero().flatten().tolist() == list(range(length - window_reach(layers, size), length))


@pytest.mark.ledger("sp.window.depth")
def test_the_span_of_32_layers_is_no_round_number():
    assert window_reach(32, 4096) == 131_041 < 32 * 4096
    assert window_reach(32, 4097) == 32 * 4096 + 1  # where the window is 4096 tokens beside itself


def test_rings_and_windows_leave_other_bodies_alone():
    assert "window" not in " ".join(groups(plan(layer(SwiGLU(40)))))
