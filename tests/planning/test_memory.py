"""Bytes of states, caches and materialized scores, and traffic of tiled attention, each against a direct count."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention, use_backend
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.linear_attention import LinearAttention
from regard.parts.recurrent import RNN
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4 import S4, S4D
from regard.planning import plan
from regard.planning.memory import score_bytes, standard_traffic, tile_rows, tiled_traffic
from regard.planning.speed import DEVICES
from regard.planning.training import saved_bytes
from tests.planning.test_flops import LENGTHS, slope

D = 256


def decoder(mixer: Body, width: int = D, layers: int = 1) -> Decoder:
    return Decoder(64, width, (Repeat((Block((Sublayer(mixer),)),), layers),))


@pytest.mark.ledger("ssm.table")
@pytest.mark.parametrize(
    ("mixer", "elements"),
    [
        (RNN(), D),
        (S4(16), D * 16),
        (S4D(16), D * 16),
        (S4D(64), D * 64),  # d·N, not O(d)
        (Mamba(state=16, expand=2, taps=4), 2 * D * 16 + 2 * D * 3),  # its short convolution caches three tokens
        (Mamba2(state=64, head_dim=64), 2 * D * 64 + (2 * D + 2 * 64) * 3),
        (LinearAttention(4), 4 * (64 * 64 + 64)),  # d_k·d_v per head, and the normalizer
        (LinearAttention(1), D * D + D),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_states_have_the_stated_size_at_any_context(mixer: Body, elements: int) -> None:
    for context in (100, 100_000):
        planned = plan(decoder(mixer), context=context)
        assert planned.state_bytes == 4 * elements
        assert planned.kv_bytes() == 0


@pytest.mark.ledger("ssm.table")
def test_only_the_cache_of_attention_grows_with_the_context() -> None:
    short, long = (plan(decoder(Attention(4)), context=context) for context in (100, 100_000))
    assert (short.state_bytes, long.state_bytes) == (0, 0)
    assert short.kv_bytes() == 4 * 2 * D * 100
    assert long.kv_bytes() == 1000 * short.kv_bytes()


@pytest.mark.ledger("ssm.table")
def test_a_state_space_convolution_takes_n_log_n_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An FFT of n values takes n log₂ n work; there are three (input, kernel, inverse), each of 2n values."""
    work = dict.fromkeys((1024, 4096, 16384), 0.0)

    def counted(transform: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, size: int) -> Tensor:
            work[length] += x[..., 0].numel() * size * math.log2(size)
            return transform(x, size)

        return call

    for name in ("rfft", "irfft"):
        monkeypatch.setattr(torch.fft, name, counted(getattr(torch.fft, name)))
    module = S4D(2).build(4)
    for length in work:
        module(torch.zeros(1, length, 4), TokenLayout.whole(1, length))
        assert work[length] == 3 * 4 * 2 * length * math.log2(2 * length)
    assert work[16384] / work[1024] == pytest.approx(16 * 15 / 11)  # slightly more than linear


@pytest.mark.ledger("eff.table")
def test_memory_of_attention_grows_with_the_stated_exponents() -> None:
    """Materialized scores take n² elements, tiles save one per row, and a linear state does not grow."""

    def saved(backend: str, length: int, mixer: Body | None = None) -> int:
        model = decoder(mixer or Attention(2), 64, 2).build(seed=0)
        use_backend(model, backend)
        return saved_bytes(model, torch.zeros(1, length, dtype=torch.long))

    assert slope(lambda n: saved("reference", n), (512, 1024)) > 1.7
    assert slope(lambda n: saved("sdpa", n), (512, 1024)) == pytest.approx(1, abs=0.01)
    window = Attention(2, mask=Window(32))
    assert slope(lambda n: saved("block_sparse", n, window), (512, 1024)) == pytest.approx(1, abs=0.05)
    states = [plan(decoder(LinearAttention(heads=2), 64, 2), context=n).state_bytes for n in LENGTHS]
    assert len(set(states)) == 1 and states[0] == 2 * (2 * 32 * (32 + 1)) * 4  # layers · heads · r(d_v + 1)


@pytest.mark.ledger("flash.sizes", "calc.flash")
def test_materialized_scores_take_two_bytes_per_pair():
    assert score_bytes(131_072) == 34_359_738_368 == 32 * 2**30  # one head of one layer, FP16
    assert score_bytes(100_000) == 20 * 10**9
    assert score_bytes(100_000, heads=32) == 640 * 10**9


def simulated_traffic(length: int, head_dim: int, fast: int) -> tuple[int, int]:
    """(elements moved, most elements held at once) by the tiled loops."""
    rows = tile_rows(fast, head_dim)
    moved = max_held = 0
    for start in range(0, length, rows):
        queries = min(rows, length - start)
        moved += queries * head_dim  # Q in
        for other in range(0, length, rows):
            keys = min(rows, length - other)
            moved += 2 * keys * head_dim  # K and V in
            max_held = max(max_held, 2 * queries * head_dim + 2 * keys * head_dim)
        moved += queries * head_dim  # O out
    return moved, max_held


@pytest.mark.ledger("flash.io", "calc.flash")
@pytest.mark.parametrize("length", [1, 100, 512, 1000])
@pytest.mark.parametrize("head_dim, fast", [(8, 1024), (64, 4096), (64, 100_000), (128, 513)])
def test_tiled_traffic_equals_that_of_the_loops(length, head_dim, fast):
    moved, max_held = simulated_traffic(length, head_dim, fast)
    assert moved == tiled_traffic(length, head_dim, fast)
    assert max_held <= fast


@pytest.mark.ledger("flash.io", "calc.flash")
def test_tiles_save_traffic_unless_the_head_dim_is_large():
    length, head_dim = 65_536, 128
    fast = DEVICES["h100"].shared_memory // 2  # elements of 16 bits
    gain = standard_traffic(length, head_dim) / tiled_traffic(length, head_dim, fast)
    assert gain == pytest.approx(fast / (2 * head_dim**2), rel=0.05)
    for large_head_dim in (64, 128, 256):
        fast = large_head_dim**2 - 1  # E² > M
        assert tiled_traffic(length, large_head_dim, fast) > standard_traffic(length, large_head_dim)
    slope = math.log2(tiled_traffic(2 * length, 64, 2**15) / tiled_traffic(length, 64, 2**15))
    assert slope == pytest.approx(2, abs=0.01)  # tiling saves a factor; the traffic stays quadratic
    with pytest.raises(ValueError, match="at least 512"):
        tiled_traffic(10, 128, 511)
