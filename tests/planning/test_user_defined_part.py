"""A part that is defined outside the package is planned from its declarations; nothing in planning/ names it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import SwiGLU
from regard.parts.state import STATELESS, PerToken, State
from regard.planning import groups, plan, rows

WIDTH, KEYS, TABLES = 16, 4, 3


@regard.register("neighbour_mean")
@dataclass(frozen=True)
class NeighbourMean(Body):
    """The mean of the last KEYS values, projected by the first of several matrices."""

    mixes: ClassVar[bool] = True

    @property
    def max_keys(self) -> int:
        return KEYS

    def attention_sizes(self, width: int) -> tuple[int, int, int]:
        return 1, 1, width

    def memory(self, width: int) -> PerToken:
        return PerToken({"v": (1, width)}, window=KEYS)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return 2 * tokens * width * (width + keys)

    def inactive_params(self, width: int, tokens: int = 1) -> int:
        return (TABLES - 1) * width * width

    def build(self, width: int) -> nn.Module:
        return NeighbourMeanModule(width)


class NeighbourMeanModule(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.tables = nn.Parameter(torch.empty(TABLES, width, width).normal_(std=width**-0.5))

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        weights = torch.ones(x.shape[1], x.shape[1]).tril().triu(1 - KEYS) / KEYS
        return weights @ (x @ self.tables[0])


BLOCK = Block((Sublayer(NeighbourMean()), Sublayer(SwiGLU(24))))
SPEC = Decoder(32, WIDTH, (Repeat((BLOCK,), 2),), context=64)


def test_parameters_are_counted_by_kind_and_inactive_ones_as_declared():
    count = plan(SPEC).count
    assert count.parts["neighbour_mean"] == 2 * TABLES * WIDTH * WIDTH
    assert count.total == sum(parameter.numel() for parameter in SPEC.build(seed=0).parameters())
    assert count.inactive == 2 * (TABLES - 1) * WIDTH * WIDTH


def test_flops_stop_growing_at_the_declared_keys():
    with FlopCounterMode(display=False) as counter:
        SPEC.build(seed=0)(torch.zeros(1, KEYS, dtype=torch.long))
    planned = plan(SPEC)
    assert planned.flops(KEYS, KEYS) == counter.get_total_flops()
    assert planned.flops(1, 10**6) == planned.flops(1, KEYS) > planned.flops(1, KEYS - 1)


def test_the_cache_and_the_window_are_planned_as_declared():
    planned = plan(SPEC, batch=3)
    assert planned.kv_bytes() == 3 * 2 * KEYS * WIDTH * 4
    data = groups(planned)
    assert data["attention_1x16_kv_1"]["layers"] == data["window_of_4"]["layers"] == 2
    assert "neighbour mean" in [quantity for _, quantity, _ in rows(data)]
