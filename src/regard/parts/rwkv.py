"""RWKV-4's two mixers: time mixing instead of attention, and channel mixing instead of the feed-forward layer.

    μ_m(x)_t = m ⊙ x_t + (1 - m) ⊙ x_{t-1}                          each token is mixed with the previous one
    time      out = W_o (σ(W_r μ_r(x)) ⊙ wkv(W_k μ_k(x), W_v μ_v(x)))      wkv in kernels/recurrent/wkv
    channel   out = σ(W_r μ_r(x)) ⊙ W_down relu(W_up μ_k(x))²

The state has a fixed size: the last token, and for time mixing the sums of wkv. μ is a short convolution with the two
taps m and 1 - m. Peng et al. 2023.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.convolution import convolve
from regard.kernels.recurrent.implied_map import channel_groups, token_distances
from regard.kernels.recurrent.wkv import EMPTY, Sums, WKVInputs, wkv
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.parts.tap import MapKind, Tap
from regard.spec import require


@dataclass(frozen=True)
class TimeMixing(Body):
    mixes: ClassVar[bool] = True

    hidden: int | None = None  # channels; None: the width

    def check(self) -> None:
        require(self.hidden is None or self.hidden > 0, f"time_mixing: hidden={self.hidden} must be positive")

    def build(self, width: int) -> nn.Module:
        return TimeMixingModule(width, self)

    def memory(self, width: int) -> FixedSize:
        hidden = self.hidden or width
        # value, weight and peak are the arrays of Sums in kernels/recurrent/wkv
        return FixedSize({"last": (1, width), "value": (hidden,), "weight": (hidden,), "peak": (hidden,)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return 8 * tokens * width * (self.hidden or width)


class TimeMixingModule(nn.Module):
    attention_taps: tuple[str, ...] = ("k",)
    reads_source = False
    map_kind = MapKind("RWKV", signed=False, normalized=True, channels=True)

    def __init__(self, width: int, spec: TimeMixing):
        super().__init__()
        hidden = spec.hidden or width
        self.memory, self.heads = spec.memory(width), channel_groups(hidden)  # heads: groups of channels, of the map
        self.k_mix, self.v_mix, self.r_mix = Mix(width), Mix(width), Mix(width)
        self.k_proj = nn.Linear(width, hidden, bias=False)
        self.v_proj = nn.Linear(width, hidden, bias=False)
        self.r_proj = nn.Linear(width, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, width, bias=False)
        # log -w, where e^w is the decay factor of wkv. Initial time constants are from hundreds of tokens to less than
        # one, as in the first layer of RWKV's own code.
        self.log_decay = nn.Parameter(torch.linspace(-5, 3, hidden))
        self.bonus = nn.Parameter(torch.full((hidden,), math.log(0.3)))
        self.k, self.v, self.z = Tap(), Tap(), Tap()  # keys, values and wkv, (B, L, F)

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        zeros = self.memory.zeros(x)
        last, *past = state.read(layout, **zeros | {"peak": torch.full_like(zeros["peak"], EMPTY)})
        (k, next_last), (v, _), (r, _) = (mix(x, last, layout) for mix in (self.k_mix, self.v_mix, self.r_mix))
        w = -self.log_decay.to(last.dtype).exp()
        k, v = self.k(self.k_proj(k)), self.v(self.v_proj(v))  # (B, L, F)
        out, past = wkv(WKVInputs(k, v, w, self.bonus, Sums(*past), layout.documents, layout.valid))
        state.write(layout, last=next_last, **past._asdict())
        return self.o_proj(self.r_proj(r).sigmoid() * self.z(out.to(x.dtype)))

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        """The mean weights of wkv over the channels of each group; a channel's weights sum to one."""
        k, groups = taps["k"], range(self.heads)[heads]
        k = k.to(torch.promote_types(k.dtype, torch.float32))
        distance, reads = token_distances(layout.documents, layout.valid, layout.positions)
        own = torch.eye(k.shape[1], dtype=torch.bool, device=k.device)
        w, size = -self.log_decay.to(k.dtype).exp(), k.shape[-1] // self.heads
        maps = []
        for group in groups:
            total = k.new_zeros(reads.shape)  # (B, L, L)
            for f in range(group * size, (group + 1) * size):  # one at a time: a channel has L² weights
                past = (distance - 1) * w[f] + k[:, None, :, f]
                s = torch.where(own, self.bonus[f] + k[:, None, :, f], past.masked_fill(~reads, -torch.inf))
                total += s.softmax(-1)
            maps.append(total / size)
        return torch.stack(maps, 1)


@dataclass(frozen=True)
class ChannelMixing(Body):
    mixes: ClassVar[bool] = True

    hidden: int | None = None  # None: 4 · width

    def check(self) -> None:
        require(self.hidden is None or self.hidden > 0, f"channel_mixing: hidden={self.hidden} must be positive")

    def build(self, width: int) -> nn.Module:
        return ChannelMixingModule(width, self.hidden or 4 * width)

    def memory(self, width: int) -> FixedSize:
        return FixedSize({"last": (1, width)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return 2 * tokens * width * (2 * (self.hidden or 4 * width) + width)


class ChannelMixingModule(nn.Module):
    no_attention_map = "it is no linear function of the tokens: relu² of a mixture of a token with the previous one"

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.k_mix, self.r_mix = Mix(width), Mix(width)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.r_proj = nn.Linear(width, width, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.neurons = Tap()

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        (last,) = state.read(layout, last=torch.zeros_like(x[:, :1]))  # (B, 1, D)
        (k, next_last), (r, _) = self.k_mix(x, last, layout), self.r_mix(x, last, layout)
        state.write(layout, last=next_last)
        return self.r_proj(r).sigmoid() * self.down_proj(self.neurons(F.relu(self.up_proj(k)).square()))


class Mix(nn.Module):
    """m ⊙ x_t + (1 - m) ⊙ x_{t-1}; the initial m grows from 0 in the first channel to almost 1 in the last."""

    def __init__(self, width: int):
        super().__init__()
        self.share = nn.Parameter(torch.linspace(0, 1 - 1 / width, width))  # m: the share of the current token

    def forward(self, x: Tensor, last: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """The mixed tokens (B, L, D), and the last token (B, 1, D) for the next forward."""
        return convolve(x, torch.stack([self.share, 1 - self.share]), None, last, layout)
