"""What each mixer keeps of a text and what it costs to read one: the tables of recurrences, as counted."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.linear_attention import LinearAttention
from regard.parts.rnn import RNN
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.parts.ssm.s4 import S4
from regard.parts.ssm.s4d import S4D
from regard.plan import plan

D = 256


def layer(mixer: Body) -> Decoder:
    return Decoder(64, D, (Repeat((Block((Sublayer(mixer),)),)),))


@pytest.mark.ledger("ssm.table")
@pytest.mark.parametrize(
    ("mixer", "numbers"),
    [
        (RNN(), D),
        (S4(16), D * 16),
        (S4D(16), D * 16),
        (S4D(64), D * 64),  # d·N, not O(d)
        (Mamba(state=16, expand=2, taps=4), 2 * D * 16 + 2 * D * 3),  # its short convolution remembers three tokens
        (Mamba2(state=64, head_dim=64), 2 * D * 64 + (2 * D + 2 * 64) * 3),
        (LinearAttention(4), 4 * (64 * 64 + 64)),  # d_k·d_v a head, and the sum that normalises
        (LinearAttention(1), D * D + D),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_states_have_the_size_that_the_plan_says(mixer: Body, numbers: int) -> None:
    for context in (100, 100_000):
        planned = plan(layer(mixer), context=context)
        assert planned.state_bytes == 4 * numbers
        assert planned.kv_bytes() == 0


@pytest.mark.ledger("ssm.table")
def test_only_attention_keeps_more_of_longer_texts() -> None:
    short, long = (plan(layer(Attention(4)), context=context) for context in (100, 100_000))
    assert (short.state_bytes, long.state_bytes) == (0, 0)
    assert short.kv_bytes() == 4 * 2 * D * 100
    assert long.kv_bytes() == 1000 * short.kv_bytes()


@pytest.mark.ledger("ssm.table")
def test_a_filter_is_trained_in_n_log_n(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform of n values takes n log₂ n of work: of the input, of the kernel, and back, each twice as long."""
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
    assert work[16384] / work[1024] == pytest.approx(16 * 15 / 11)  # more than linear, far from quadratic
