"""Choosing tiles and launching the kernels."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.kernels.attention.triton.backward import dots, for_keys, for_queries
from regard.kernels.attention.triton.forward import forward
from regard.kernels.attention.triton.tile import LOG2E, TileConfig

GRAIN = 128  # tokens of a tile for which bounds are found; a kernel's own tiles divide it


class TileSize(NamedTuple):
    """Of a tile and of the programs that work on it."""

    queries: int
    keys: int
    warps: int
    stages: int


class LaunchConfig(NamedTuple):
    """What is done to scores, as plain numbers."""

    scale: float
    cap: float  # 0: none
    before: int
    after: int
    first: int
    bias: str
    reach: int  # of a line

    @property
    def factors(self) -> tuple[float, float]:
        """In units of log 2: of the scores, and inside a cap's tanh."""
        log2e = LOG2E.value
        return (self.cap * log2e, 2 * log2e * self.scale / self.cap) if self.cap else (self.scale * log2e, 0.0)


# The fastest on an H200 for bf16 and heads of 128, and what fits where there is more to hold: longer rows, a line of
# which every pair of the tile takes its number.
SIZES = {
    "forward": TileSize(128, 128, 8, 3),
    "for_queries": TileSize(128, 64, 8, 3),
    "for_keys": TileSize(64, 64, 4, 2),
}
SMALL = {"forward": TileSize(64, 32, 4, 2), "for_queries": TileSize(64, 32, 8, 2), "for_keys": TileSize(32, 64, 8, 2)}


def size_of(kernel: str, q: Tensor, k: Tensor, v: Tensor, recipe: LaunchConfig, ordered: bool) -> TileSize:
    row = q.element_size() * max(q.shape[-1], v.shape[-1])
    size = SMALL[kernel] if row > 256 or recipe.bias == "line" else SIZES[kernel]
    return TileSize(
        min(size.queries, power(q.shape[2])),
        min(size.keys, power(k.shape[2])),
        size.warps,
        size.stages if ordered else min(size.stages, 2),  # places need room too
    )


def form_of(size: TileSize, q: Tensor, v: Tensor, recipe: LaunchConfig, ordered: bool) -> TileConfig:
    length = q.shape[2]
    return TileConfig(
        queries=size.queries,
        keys=size.keys,
        wide=power(q.shape[-1]),
        value_wide=power(v.shape[-1]),
        before=recipe.before,
        after=recipe.after,
        first=recipe.first,
        ordered=ordered,
        even=ordered and length % size.queries == 0 and length % size.keys == 0,
        cap=recipe.cap > 0,
        bias=recipe.bias,
        grain=GRAIN,
    )


def power(number: int) -> int:
    """Up to the next power of two, and to the least that matrix units take."""
    return max(16, triton.next_power_of_2(number))


def rows_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Heads as the GPU's copy engine takes them, so many rows at a time: it begins rows at multiples of 16 bytes."""
    pitch = 16 // x.element_size()
    strides = [stride if size > 1 else pitch for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, power(x.shape[-1])])


def aligned(x: Tensor) -> Tensor:
    """Itself, or a copy where the copy engine could not read it."""
    pitch = 16 // x.element_size()
    steps = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    even = all(step > 0 and step % pitch == 0 for step in steps) and x.data_ptr() % 16 == 0
    return x if even and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, where: list[Tensor],
    recipe: LaunchConfig,
    early: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, log₂ Σ 2^s (B, H, L); and with `early` entropy, weights on early and on top keys (3, B, H, L), top keys."""
    (batch, heads, length, _), keys = q.shape, k.shape[2]
    q, k, v = aligned(q), aligned(k), aligned(v)
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    log_sum = q.new_empty(batch, heads, length, dtype=torch.float32)
    statistics = early is not None
    found = q.new_empty(3 if statistics else 0, batch, heads, length, dtype=torch.float32)
    top = q.new_empty((batch, heads, length) if statistics else 0, dtype=torch.int32)
    size = size_of("forward", q, k, v, recipe, not where)
    q_at, k_at, q_document, k_document, bounds, _ = where or [log_sum] * 6
    factor, inner = recipe.factors
    forward[(triton.cdiv(length, size.queries) * batch * heads,)](
        rows_of(q, size.queries), rows_of(k, size.keys), rows_of(v, size.keys), rows_of(out, size.queries), log_sum,
        log_sum if sinks is None else sinks, log_sum if bias is None else bias,
        q_at, k_at, q_document, k_document, bounds, found, top,
        heads, heads // k.shape[1], length, keys, factor, inner, recipe.reach, early or 0,
        FORM=form_of(size, q, v, recipe, not where)._replace(sinks=sinks is not None, statistics=statistics),
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return out, log_sum, found, top


def run_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor | None,
    where: list[Tensor], recipe: LaunchConfig, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, the gradient of a line (H, 2 · reach + 1) or nothing, and D (B, H, L)."""
    (batch, heads, length, _), keys, kv_heads = q.shape, k.shape[2], k.shape[1]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    d_out, q, k, v = aligned(d_out), aligned(q), aligned(k), aligned(v)
    delta = torch.empty_like(log_sum)
    d_bias = torch.zeros_like(bias) if learned and bias is not None else log_sum.new_empty(0)
    q_at, k_at, q_document, k_document, key_bounds, query_bounds = where or [log_sum] * 6
    given: Any = (log_sum, delta, log_sum if bias is None else bias, q_at, k_at, q_document, k_document)
    numbers: Any = (heads, heads // kv_heads, length, keys, recipe.scale, *recipe.factors, recipe.reach)
    size = size_of("for_queries", q, k, v, recipe, not where)
    form = form_of(size, q, v, recipe, not where)
    dots[(triton.cdiv(length, size.queries) * batch * heads,)](
        rows_of(out, size.queries), rows_of(d_out, size.queries), delta, heads, length, FORM=form
    )  # fmt: skip
    for_queries[(triton.cdiv(length, size.queries) * batch * heads,)](
        rows_of(q, size.queries), rows_of(k, size.keys), rows_of(v, size.keys), rows_of(d_out, size.queries),
        rows_of(dq, size.queries), d_bias if learned else log_sum, *given, key_bounds, *numbers,
        FORM=form._replace(learned=learned), num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    size = size_of("for_keys", q, k, v, recipe, not where)
    for_keys[(triton.cdiv(keys, size.keys) * batch * kv_heads,)](
        rows_of(q, size.queries), rows_of(k, size.keys), rows_of(v, size.keys), rows_of(d_out, size.queries),
        rows_of(dk, size.keys), rows_of(dv, size.keys), *given, query_bounds, *numbers,
        FORM=form_of(size, q, v, recipe, not where), num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return dq, dk, dv, d_bias, delta
