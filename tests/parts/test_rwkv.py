"""RWKV's two mixers equal the modules of `transformers` with the same weights: whole, and in chunks with a state."""

import pytest
import torch
from torch import Tensor, nn
from transformers import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward, RwkvSelfAttention

from regard.engine.stores.contiguous import Contiguous
from regard.layout import TokenLayout
from regard.parts.rwkv import ChannelMixing, TimeMixing
from regard.spec import SpecError

WIDTH, HIDDEN = 12, 20
CONFIG = RwkvConfig(hidden_size=WIDTH, attention_hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1)
NAMES = {
    "time_mix_key": "k_mix.share",
    "time_mix_value": "v_mix.share",
    "time_mix_receptance": "r_mix.share",
    "time_decay": "log_decay",
    "time_first": "bonus",
    "receptance.weight": "r_proj.weight",
}
TIME = NAMES | {"key.weight": "k_proj.weight", "value.weight": "v_proj.weight", "output.weight": "o_proj.weight"}
CHANNEL = NAMES | {"key.weight": "up_proj.weight", "value.weight": "down_proj.weight"}
PAIRS = {
    "time": (TimeMixing(HIDDEN), RwkvSelfAttention, TIME),
    "channel": (ChannelMixing(HIDDEN), RwkvFeedForward, CHANNEL),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[TimeMixing | ChannelMixing, nn.Module, nn.Module]:
    spec, cls, names = PAIRS[request.param]
    theirs, ours = cls(CONFIG).requires_grad_(False), spec.build(WIDTH).requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.copy_(0.6 * torch.randn(parameter.shape))
    ours.load_state_dict({names[name]: weight.squeeze() for name, weight in theirs.state_dict().items()})
    return spec, ours, theirs


def is_close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("length", [1, 5, 32, 70])
def test_whole_sequences_equal_transformers(pair: tuple, length: int) -> None:
    _, ours, theirs = pair
    x = torch.randn(2, length, WIDTH)
    assert is_close(ours(x, TokenLayout.whole(2, length)), theirs(x)[0])


def test_chunks_with_a_state_equal_transformers(pair: tuple) -> None:
    spec, ours, theirs = pair
    x = torch.randn(1, 9, WIDTH)
    store = Contiguous(((spec.memory(WIDTH),),), 1, 9, torch.float32)
    state = [torch.zeros(1, size, 1) for size in (WIDTH, WIDTH, HIDDEN, HIDDEN, HIDDEN)]
    state[4] -= 1e30
    start = 0
    for size in (4, 1, 1, 3):
        chunk = x[:, start : start + size]
        expected, state = theirs(chunk, state=state)
        found = ours(
            chunk, layout := TokenLayout(torch.arange(start, start + size)[None]), store.begin_forward(layout)[0][0]
        )
        assert is_close(found, expected)
        start += size


def test_states_have_their_shapes_and_invalid_sizes_are_refused() -> None:
    assert TimeMixing().memory(8).arrays == {"last": (1, 8), "value": (8,), "weight": (8,), "peak": (8,)}
    assert ChannelMixing().build(8).up_proj.weight.shape == (32, 8)
    with pytest.raises(SpecError, match="time_mixing: hidden=0 must be positive"):
        TimeMixing(0)
    with pytest.raises(SpecError, match="channel_mixing: hidden=0 must be positive"):
        ChannelMixing(0)
