"""Choose the tile sizes of the attention kernels and launch them."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.kernels.attention.triton.backward import key_gradients, query_gradients, row_dots
from regard.kernels.attention.triton.forward import forward
from regard.kernels.attention.triton.tile import LOG2E, TileConfig

BOUNDS_TILE = 128  # tokens per tile of the bounds; a multiple of the tiles of all kernels


class TileSize(NamedTuple):
    """Tile size of a kernel in tokens, and its warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class LaunchConfig(NamedTuple):
    """Score options and mask limits as plain numbers."""

    scale: float
    cap: float  # 0: no cap
    before: int  # the mask limits and the bias: as in TileConfig
    after: int
    first: int
    bias: str
    max_distance: int  # largest |offset| in the table of a bias by offset; larger ones are clamped

    @property
    def factors(self) -> tuple[float, float]:
        """The factor that converts scores to base 2 (tile.py), and the factor inside the tanh of the cap."""
        log2e = LOG2E.value
        return (self.cap * log2e, 2 * log2e * self.scale / self.cap) if self.cap else (self.scale * log2e, 0.0)


# SIZES are the fastest on an H200 for bf16 and a head_dim of 128. SMALL is for wider heads and for a bias by offset,
# which need more shared memory and registers.
SIZES = {
    "forward": TileSize(128, 128, 8, 3),
    "query_gradients": TileSize(128, 64, 8, 3),
    "key_gradients": TileSize(64, 64, 4, 2),
}
SMALL = {
    "forward": TileSize(64, 32, 4, 2),
    "query_gradients": TileSize(64, 32, 8, 2),
    "key_gradients": TileSize(32, 64, 8, 2),
}


def tile_size(kernel: str, q: Tensor, k: Tensor, v: Tensor, config: LaunchConfig, ordered: bool) -> TileSize:
    row_bytes = q.element_size() * max(q.shape[-1], v.shape[-1])
    size = SMALL[kernel] if row_bytes > 256 or config.bias == "offsets" else SIZES[kernel]
    return TileSize(
        min(size.queries, padded_size(q.shape[2])),
        min(size.keys, padded_size(k.shape[2])),
        size.warps,
        size.stages if ordered else min(size.stages, 2),  # positions need shared memory too
    )


def tile_config(size: TileSize, q: Tensor, v: Tensor, config: LaunchConfig, ordered: bool) -> TileConfig:
    length = q.shape[2]
    return TileConfig(
        queries=size.queries,
        keys=size.keys,
        key_dim=padded_size(q.shape[-1]),
        value_dim=padded_size(v.shape[-1]),
        before=config.before,
        after=config.after,
        first=config.first,
        ordered=ordered,
        full_tiles=ordered and length % size.queries == 0 and length % size.keys == 0,
        cap=config.cap > 0,
        bias=config.bias,
        bounds_tile=BOUNDS_TILE,
    )


def padded_size(number: int) -> int:
    """The next power of two, at least 16, the smallest size that tensor cores take."""
    return max(16, triton.next_power_of_2(number))


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor that loads or stores `rows` tokens of one head; TMA needs strides of a multiple of 16 bytes."""
    alignment = 16 // x.element_size()
    strides = [stride if size > 1 else alignment for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, padded_size(x.shape[-1])])


def aligned(x: Tensor) -> Tensor:
    """x, or a contiguous copy if x does not have the alignment that TMA needs."""
    alignment = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    is_aligned = all(stride > 0 and stride % alignment == 0 for stride in strides) and x.data_ptr() % 16 == 0
    return x if is_aligned and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, token_arrays: list[Tensor],
    config: LaunchConfig,
    first_keys: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out and log₂ Σ 2^s (B, H, L); with `first_keys` also three statistics (3, B, H, L) and the top keys.

    first_keys: the number of first tokens whose total weight is one of the statistics.
    """
    (batch, heads, length, _), keys = q.shape, k.shape[2]
    q, k, v = aligned(q), aligned(k), aligned(v)
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    log_sum = q.new_empty(batch, heads, length, dtype=torch.float32)
    statistics = first_keys is not None
    stats = q.new_empty(3 if statistics else 0, batch, heads, length, dtype=torch.float32)
    top_key = q.new_empty((batch, heads, length) if statistics else 0, dtype=torch.int32)
    size = tile_size("forward", q, k, v, config, not token_arrays)
    q_positions, k_positions, q_document, k_document, bounds, _ = token_arrays or [log_sum] * 6
    factor, tanh_factor = config.factors
    tile = tile_config(size, q, v, config, not token_arrays)
    forward[(triton.cdiv(length, size.queries) * batch * heads,)](
        descriptor(q, size.queries), descriptor(k, size.keys), descriptor(v, size.keys), descriptor(out, size.queries),
        log_sum,
        log_sum if sinks is None else sinks, log_sum if bias is None else bias,
        q_positions, k_positions, q_document, k_document, bounds, stats, top_key,
        heads, heads // k.shape[1], length, keys, factor, tanh_factor, config.max_distance, first_keys or 0,
        CONFIG=tile._replace(sinks=sinks is not None, statistics=statistics),
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return out, log_sum, stats, top_key


def run_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor | None,
    token_arrays: list[Tensor], config: LaunchConfig, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, the gradient of the offsets (H, 2 · max_distance + 1) or an empty tensor, and D (B, H, L)."""
    (batch, heads, length, _), keys, kv_heads = q.shape, k.shape[2], k.shape[1]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    d_out, q, k, v = aligned(d_out), aligned(q), aligned(k), aligned(v)
    delta = torch.empty_like(log_sum)
    d_bias = torch.zeros_like(bias) if learned and bias is not None else log_sum.new_empty(0)
    q_positions, k_positions, q_document, k_document, key_bounds, query_bounds = token_arrays or [log_sum] * 6
    tensors: Any = (
        log_sum, delta, log_sum if bias is None else bias, q_positions, k_positions, q_document, k_document
    )  # fmt: skip
    scalars: Any = (heads, heads // kv_heads, length, keys, config.scale, *config.factors, config.max_distance)
    size = tile_size("query_gradients", q, k, v, config, not token_arrays)
    tile = tile_config(size, q, v, config, not token_arrays)
    row_dots[(triton.cdiv(length, size.queries) * batch * heads,)](
        descriptor(out, size.queries), descriptor(d_out, size.queries), delta, heads, length, CONFIG=tile
    )  # fmt: skip
    query_gradients[(triton.cdiv(length, size.queries) * batch * heads,)](
        descriptor(q, size.queries), descriptor(k, size.keys), descriptor(v, size.keys),
        descriptor(d_out, size.queries), descriptor(dq, size.queries),
        d_bias if learned else log_sum, *tensors, key_bounds, *scalars,
        CONFIG=tile._replace(learned=learned), num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    size = tile_size("key_gradients", q, k, v, config, not token_arrays)
    key_gradients[(triton.cdiv(keys, size.keys) * batch * kv_heads,)](
        descriptor(q, size.queries), descriptor(k, size.keys), descriptor(v, size.keys),
        descriptor(d_out, size.queries), descriptor(dk, size.keys), descriptor(dv, size.keys),
        *tensors, query_bounds, *scalars,
        CONFIG=tile_config(size, q, v, config, not token_arrays), num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return dq, dk, dv, d_bias, delta
