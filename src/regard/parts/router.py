"""The router of a mixture of experts: it selects k experts per token and weights their outputs.

    s = softmax(W x)  or  sigmoid(W x)          the experts with the k largest s_i + c_i, with weights s_i

Shazeer et al. 2017; Fedus et al. 2021 (Switch). Weights that are renormalized to a sum of one are the softmax over the
chosen logits alone, so "softmax after the choice" (Mixtral, GPT-OSS) equals softmax before it with `renormalize`. A
correction c changes the selection and not the weights, and the selection may be limited to the best groups of experts
(DeepSeek-V3, 2024). Two auxiliary losses are computed over the valid tokens of one forward:

    balance = X Σ_i f_i P_i          f_i: the share of tokens that chose expert i; P_i: the mean of s_i      Switch
    z       = mean (log Σ_i exp(W x)_i)²                                                   ST-MoE, Zoph et al. 2022

`balance` is k if all experts are used equally, and larger the more the selection is concentrated.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.autocast import without_autocast
from regard.parts.split_heads import divisors
from regard.spec import Spec, SpecError, require


@dataclass(frozen=True)
class Router(Spec):
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool | None = None  # None: if top_k > 1; a single weight of 1 would have no gradient
    scale: float = 1.0  # factor of all weights
    bias: bool = False
    correction: bool = False  # c: read from checkpoints, not trained
    groups: int = 1
    top_groups: int = 1  # groups that a token's experts may come from
    group_best: int = 2  # a group is ranked by the sum of its best scores: 1 in DeepSeek-V2, 2 in V3
    jitter: float = 0.0  # training: inputs times U(1 - jitter, 1 + jitter); Switch
    noise: bool = False  # training: logits plus normal noise of a learned deviation; Shazeer et al. 2017

    def check(self) -> None:
        require(0 <= self.jitter < 1, f"router: jitter={self.jitter} must be in [0, 1)")
        for name in ("groups", "top_groups", "group_best"):
            require(getattr(self, name) > 0, f"router: {name}={getattr(self, name)} must be positive")
        require(
            self.top_groups <= self.groups,
            f"router: top_groups={self.top_groups} is more than groups={self.groups}; choose at most {self.groups}",
        )

    def check_sizes(self, count: int, top_k: int) -> None:
        """Raise SpecError if a router of this spec cannot select top_k of `count` experts."""
        if count % self.groups:
            raise SpecError(
                f"router: {count} experts cannot be split into groups={self.groups} of equal size; "
                f"choose one of {', '.join(map(str, divisors(count)))}"
            )
        candidates = self.top_groups * count // self.groups
        require(
            top_k <= candidates,
            f"router: top_k={top_k} is more than the {candidates} experts of top_groups={self.top_groups}; raise it",
        )

    def renormalizes(self, top_k: int) -> bool:
        return top_k > 1 if self.renormalize is None else self.renormalize

    def build(self, width: int, count: int, top_k: int) -> "RouterModule":
        return RouterModule(width, self, count, top_k)


class Routing(NamedTuple):
    chosen: Tensor  # (T, k) experts of each token, best first
    weights: Tensor  # (T, k)
    scores: Tensor  # (T, X)
    logits: Tensor  # (T, X)


class RouterModule(nn.Module):
    training_only = ("noise_proj",)

    def __init__(self, width: int, spec: Router, count: int, top_k: int):
        super().__init__()
        self.spec, self.top_k = spec, top_k
        self.renormalize = spec.renormalizes(top_k)
        self.proj = nn.Linear(width, count, bias=spec.bias)
        self.noise_proj = nn.Linear(width, count, bias=False) if spec.noise else None
        self.correction = nn.Parameter(torch.zeros(count), requires_grad=False) if spec.correction else None

    def forward(self, x: Tensor) -> Tensor:
        """x (T, D) -> logits (T, X)"""
        with without_autocast(x.device):  # rounded logits could select other experts
            logits = self.logits(x)
        return logits.to(torch.promote_types(x.dtype, torch.float32))

    def route(self, logits: Tensor) -> Routing:
        """The k experts of every token and their weights."""
        scores = logits.softmax(-1) if self.spec.scores == "softmax" else logits.sigmoid()
        chosen = self.choose(scores.detach())  # (T, k)
        weights = scores.gather(-1, chosen)  # (T, k)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # all sigmoids may be 0
        return Routing(chosen, weights * self.spec.scale, scores, logits)

    def logits(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.proj(x)
        if self.spec.jitter > 0:
            x = x * torch.empty_like(x).uniform_(1 - self.spec.jitter, 1 + self.spec.jitter)
        logits = self.proj(x)
        if self.noise_proj is not None:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise_proj(x))
        return logits

    def choose(self, scores: Tensor) -> Tensor:
        """scores (T, X) -> the k experts of every token (T, k), best first"""
        if self.correction is not None:
            scores = scores + self.correction
        if self.spec.groups > 1:
            grouped = scores.unflatten(-1, (self.spec.groups, -1))  # (T, G, X/G)
            best = min(self.spec.group_best, grouped.shape[-1])
            group_scores = grouped.topk(best).values.sum(-1)  # (T, G)
            selected = torch.zeros_like(group_scores, dtype=torch.bool)
            selected = selected.scatter(-1, group_scores.topk(self.spec.top_groups).indices, True)
            scores = grouped.masked_fill(~selected.unsqueeze(-1), -math.inf).flatten(-2)  # (T, X)
        return scores.topk(self.top_k).indices


def balance_loss(routing: Routing, valid: Tensor | None) -> Tensor:
    selected = torch.zeros_like(routing.scores).scatter(-1, routing.chosen, 1.0)  # (T, X)
    probabilities = routing.scores / routing.scores.sum(-1, keepdim=True)  # sigmoids do not sum to one
    return selected.shape[-1] * (valid_mean(selected, valid) * valid_mean(probabilities, valid)).sum()


def z_loss(routing: Routing, valid: Tensor | None) -> Tensor:
    return valid_mean(routing.logits.logsumexp(-1, keepdim=True).square(), valid).sum()


def valid_mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """(T, …) -> the mean over the valid tokens (…)"""
    if valid is None:
        return values.mean(0)
    return values.where(valid.unsqueeze(-1), 0.0).sum(0) / valid.sum().clamp_min(1)


def within_capacity(chosen: Tensor, valid: Tensor | None, count: int, factor: float) -> Tensor:
    """Mask (T, k) of the choices within capacity; every expert takes ⌈factor · k · tokens / X⌉ of them.

    First choices of all tokens come before second ones, in the order of the tokens; padding uses no capacity.
    """
    tokens, top_k = chosen.shape
    requested = F.one_hot(chosen.T.flatten(), count)  # (k·T, X)
    share = factor * top_k / count
    if valid is None:
        capacity = math.ceil(share * tokens)
    else:
        requested = requested * valid.repeat(top_k).unsqueeze(-1)
        capacity = (share * valid.sum()).ceil()
    rank = (requested.cumsum(0) * requested).sum(-1)  # (k·T,) in the expert's queue, from 1; 0: padding
    return ((rank > 0) & (rank <= capacity)).unflatten(0, (top_k, tokens)).T  # (T, k)
