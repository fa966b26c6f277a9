"""Attention to the keys that H2O or SnapKV keeps, in plain loops over all keys: the reference of stores/evicting.py.

Every query computes its weights over the keys that its kv head still keeps, one query after the other. All keys and
values of the sequence are there, so an evicted key is one that a dense mask excludes.
"""

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.engine.stores.eviction_rules import HeavyHitters, PromptWindow
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Causal
from regard.kernels.attention.reference import attention_scores
from regard.layout import TokenLayout

ReceivedSums = dict[int, float]  # attention received, by key


def after_query(
    rule: HeavyHitters | PromptWindow, i: int, kept: list[int], sums: ReceivedSums, prompt: int
) -> list[int]:
    """The keys that are kept after query i."""
    if isinstance(rule, HeavyHitters):
        if (i + 1) % rule.every:
            return kept
        total = rule.budget - rule.every
        newest = [j for j in kept if j > i - (total + 1) // 2]
        value = dict(sums)
    else:
        if i + 1 != prompt:
            return kept
        total, newest = rule.budget, [j for j in kept if j > i - rule.window]
        half, value = rule.pool // 2, {}
        for j in kept:
            near = [n for n in range(j - half, j + half + 1) if 0 <= n <= i]
            value[j] = sum(sums[n] for n in near) / len(near)
    others = sorted((j for j in kept if j not in newest), key=lambda j: -value[j])
    return sorted(newest + others[: max(0, total - len(newest))])


def counts(rule: HeavyHitters | PromptWindow, i: int, prompt: int) -> bool:
    """Whether the weights of query i are added to the sums."""
    return isinstance(rule, HeavyHitters) or prompt - rule.window <= i < prompt


@contextmanager
def attend_to_kept(model: nn.Module, rule: HeavyHitters | PromptWindow, prompt: int) -> Generator[None]:
    """Causal layers attend to the keys that the rule keeps. prompt: the number of first tokens that are the prompt."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
        s, out = attention_scores(q, k, layout, options), torch.zeros(*q.shape[:3], v.shape[-1]).to(v)
        group = q.shape[1] // k.shape[1]
        for b in range(len(q)):
            for kv_head in range(k.shape[1]):
                kept: list[int] = []
                sums: ReceivedSums = defaultdict(float)
                for i in range(q.shape[2]):
                    kept = [*kept, i]
                    for head in range(kv_head * group, (kv_head + 1) * group):
                        sink = [] if options.sinks is None else [options.sinks[head].to(s.dtype).view(1)]
                        weights = torch.cat([s[b, head, i, kept], *sink]).softmax(0)[: len(kept)]
                        out[b, head, i] = weights @ v[b, kv_head, kept]
                        if counts(rule, i, prompt):
                            for j, weight in zip(kept, weights.tolist(), strict=True):
                                sums[j] += weight
                    kept = after_query(rule, i, kept, sums, prompt)
        return out

    layers = [vars(module) for module in model.modules() if type(getattr(module, "mask", None)) is Causal]
    layers = [(layer, layer["attend"]) for layer in layers if "attend" in layer]
    try:
        for layer, _ in layers:
            layer["attend"] = attend
        yield
    finally:
        for layer, original in layers:
            layer["attend"] = original
