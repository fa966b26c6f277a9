"""Mixture of experts: many feed-forward layers, of which each token uses a few.

    y = Σ_{i in chosen(x)} w_i(x) · expert_i(x)  +  shared(x)          chosen, w: parts/router.py

Shazeer et al. 2017, Fedus et al. 2021 (Switch), Jiang et al. 2024 (Mixtral); shared experts, used by every token:
Dai et al. 2024 (DeepSeekMoE). Tokens are sorted by expert, so that each expert multiplies consecutive rows
(kernels/grouped_matmul.py). Capacity, noise and losses apply in training only: at inference no token is dropped, and
a token's output does not depend on the rest of the batch.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from regard.kernels.grouped_matmul import grouped_linear, sort_by_expert
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.feedforward import PositionWise
from regard.parts.router import Router, Routing, balance_loss, within_capacity, z_loss
from regard.parts.state import STATELESS, State
from regard.parts.tap import Tap
from regard.spec import require


@dataclass(frozen=True)
class Experts(Body):
    count: int
    top_k: int
    expert: PositionWise
    shared: PositionWise | None = None  # used by every token, in addition to the chosen ones
    shared_gate: bool = False  # shared(x) · sigmoid(w x), as in Qwen2-MoE
    router: Router = Router()
    balance: float = 0.01  # weight of the balance loss
    z: float = 0.0  # weight of the z loss
    capacity: float | None = None  # training: tokens per expert, relative to an even split; None: no limit

    def check(self) -> None:
        require(self.count > 0, f"experts: count={self.count} must be positive")
        require(0 < self.top_k <= self.count, f"experts: top_k={self.top_k} must be from 1 to count={self.count}")
        for name in ("balance", "z"):
            require(getattr(self, name) >= 0, f"experts: {name}={getattr(self, name)} must not be negative")
        require(self.capacity is None or self.capacity > 0, f"experts: capacity={self.capacity} must be positive")
        require(
            self.shared is not None or not self.shared_gate,
            "experts: shared_gate=True, but shared is None; set shared, or leave shared_gate out",
        )
        self.router.check_sizes(self.count, self.top_k)

    def canonical(self, width: int) -> Self:
        best = self.router.group_best if self.router.groups > 1 else 1
        router = replace(self.router, renormalize=self.router.renormalizes(self.top_k), group_best=best, jitter=0.0)
        return replace(self, router=router, balance=0.0, z=0.0, capacity=None)

    def build(self, width: int) -> nn.Module:
        return ExpertsModule(width, self)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        shared = 0 if self.shared is None else self.shared.flops(width, tokens, keys)
        columns = self.count + self.shared_gate  # of the router's matrix and of the shared gate's
        return tokens * 2 * width * columns + self.top_k * self.expert.flops(width, tokens, keys) + shared

    def inactive_params(self, width: int, tokens: int = 1) -> int:
        with torch.device("meta"):
            expert = self.expert.build(width)
        unused = (self.count - self.top_k) * sum(parameter.numel() for parameter in expert.parameters())
        return round(unused * (1 - self.top_k / self.count) ** (tokens - 1))


class ExpertsModule(nn.Module):
    def __init__(self, width: int, spec: Experts):
        super().__init__()
        self.spec = spec
        self.router = spec.router.build(width, spec.count, spec.top_k)
        self.experts = spec.expert.build(width, partial(GroupedLinear, spec.count))
        self.shared = None if spec.shared is None else spec.shared.build(width)
        self.shared_gate = nn.Linear(width, 1, bias=False) if spec.shared_gate else None
        self.capacity_mask = Tap()  # (T, k) choices within capacity, if it is limited

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        tokens = x.flatten(0, 1)  # (T, D)
        valid = None if layout.valid is None else layout.valid.flatten()  # (T,)
        routing = self.router.route(self.router(tokens))
        y = self.run_chosen(tokens, routing, valid).to(x.dtype).view_as(x)  # (B, L, D)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        if self.training:
            layout.add_losses(self.losses(routing, valid))
        return y

    def run_chosen(self, x: Tensor, routing: Routing, valid: Tensor | None) -> Tensor:
        """The weighted sum of the chosen experts' outputs: (T, D)"""
        chosen, top_k = routing.chosen, self.spec.top_k
        limited = self.training and self.spec.capacity is not None
        if limited:
            kept = self.capacity_mask(within_capacity(chosen, valid, self.spec.count, self.spec.capacity))
            chosen = chosen.masked_fill(~kept, self.spec.count)  # no expert: only the residual stream carries the token
        order, ends = sort_by_expert(chosen.flatten(), self.spec.count)  # (T·k,), (X,)
        if limited:
            order = order[: int(ends[-1])]
        sorted_y = self.experts(x[order // top_k], ends=(ends,))  # (T·k, D), fewer rows if some were dropped
        y = sorted_y.new_zeros(len(x) * top_k, x.shape[-1]).index_copy(0, order, sorted_y)
        return (y.unflatten(0, (-1, top_k)) * routing.weights.unsqueeze(-1)).sum(1)  # (T, D)

    def losses(self, routing: Routing, valid: Tensor | None) -> dict[str, Tensor]:
        losses = {}
        if self.spec.balance > 0:
            losses["balance"] = self.spec.balance * balance_loss(routing, valid)
        if self.spec.z > 0:
            losses["z"] = self.spec.z * z_loss(routing, valid)
        return losses


class GroupedLinear(nn.Module):
    """One linear layer per expert, applied to rows that are sorted by expert."""

    weight_decay = ("weight",)

    def __init__(self, count: int, columns: int, rows: int, bias: bool):
        super().__init__()
        bound = columns**-0.5  # as nn.Linear
        self.weight = nn.Parameter(torch.empty(count, rows, columns).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(count, rows).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (T, I) -> (T, O); the rows of expert e end at ends[e]"""
        return grouped_linear(x, self.weight, self.bias, ends)
