"""What the page shows of attention maps: thumbnails of all heads of a layer, and a part of the map of one head.

A map has L² numbers. A thumbnail has the largest weight of every patch, of at most MAX_QUERIES queries that are evenly
spaced. A part is a range of rows and columns; `pool` is the side of a square of cells that becomes its largest weight.
Rows are computed in chunks, so that memory does not grow with L².
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool1d, max_pool2d

from regard.lens.maps import relative_weights, row_entropy

THUMBNAIL_SIZE = 24
MAX_QUERIES = 256
CHUNK = 1 << 22  # weights that are computed at once


class Recording(Protocol):
    """The attention of one sequence."""

    @property
    def nbytes(self) -> int: ...

    def weights(self, layer: int, heads: slice = ..., rows: slice = ...) -> Tensor | None:
        """(heads, rows, S), or None for a layer without a map."""
        ...


class MapShape(NamedTuple):
    """Of the maps of a layer. implied: they are matrices that a recurrence implies, with negative entries."""

    heads: int
    queries: int
    keys: int
    implied: bool


class Thumbnails(NamedTuple):
    """Of the H heads of a layer. `pixels` are 255 √(w / scale), or 128 + 127 sign(w) √(|w| / scale) if `implied`.

    Without the weights of the first token, the first column of the pixels is `second`.
    """

    pixels: Tensor  # (H, rows, columns) uint8
    second: Tensor  # (H, rows) uint8
    scale: Tensor  # (H,) the largest weight
    entropy: Tensor  # (H,) the mean over the queries, in nats


class Part(NamedTuple):
    weights: Tensor  # (rows, columns), after pooling
    second: Tensor  # (rows,) the first column without the first token
    first: Tensor  # (queries,) the weight of the first token, whatever the columns are; so the next two
    peak: Tensor  # (queries,) the largest weight of all other keys
    entropy: Tensor  # (queries,) in nats


def layer_thumbnails(recording: Recording, layer: int, shape: MapShape) -> Thumbnails:
    """An implied matrix is computed whole, so few heads are computed at a time, with all their rows."""
    count = max(1, CHUNK // (min(shape.queries, MAX_QUERIES) * shape.keys)) if shape.implied else shape.heads
    parts = [
        thumbnails(recording, layer, shape, range(start, min(start + count, shape.heads)))
        for start in range(0, shape.heads, count)
    ]
    return Thumbnails(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def thumbnails(recording: Recording, layer: int, shape: MapShape, heads: range) -> Thumbnails:
    _, queries, keys, implied = shape
    width, step = min(THUMBNAIL_SIZE, keys), -(-queries // MAX_QUERIES)
    first = -(-keys // width)  # keys of the first patch
    columns, seconds, entropies = [], [], []
    for weights in chunks(recording, layer, shape, heads, range(0, queries, step)):  # (H, rows, S)
        columns.append(pool_rows(weights, width))
        seconds.append(largest(weights[..., 1:first]))
        entropies.append(entropy_of(weights, implied))
    pixels, second = torch.cat(columns, 1), torch.cat(seconds, 1)  # (H, queries, columns), (H, queries)
    height = min(THUMBNAIL_SIZE, pixels.shape[1])
    pixels = pool_rows(pixels.transpose(1, 2), height).transpose(1, 2)  # (H, rows, columns)
    second = pool_rows(second.unsqueeze(1), height).squeeze(1)
    scale = pixels.abs().amax((1, 2))
    return Thumbnails(
        to_bytes(pixels, scale[:, None, None], implied),
        to_bytes(second, scale[:, None], implied),
        scale,
        torch.cat(entropies, 1).mean(1),
    )


def head_part(
    recording: Recording, layer: int, shape: MapShape, head: int, rows: range, columns: range, pool: int
) -> Part:
    parts = []
    for weights in chunks(recording, layer, shape, range(head, head + 1), rows, pool):
        window = weights[..., columns.start : columns.stop]  # (1, rows, columns)
        pooled = pool_squares(window, pool)
        rest = window[..., max(1 - columns.start, 0) : pool]
        second = pool_squares(rest, pool)[0, :, 0] if rest.shape[-1] else torch.zeros_like(pooled[0, :, 0])
        peak = largest(weights[0, :, 1:]).abs()
        parts.append(Part(pooled[0], second, weights[0, :, 0], peak, entropy_of(weights, shape.implied)[0]))
    return Part(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def chunks(
    recording: Recording, layer: int, shape: MapShape, heads: range, rows: range, multiple: int = 1
) -> Iterator[Tensor]:
    """The weights (heads, rows, S) of a multiple of so many rows at a time, in float32 on the CPU. All rows of an
    implied matrix are one chunk, since every chunk would compute the whole matrix."""
    count = max(CHUNK // (len(heads) * shape.keys) // multiple, 1) * multiple
    count = len(rows) if shape.implied else count
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        weights = recording.weights(layer, slice(heads.start, heads.stop), slice(part.start, part.stop, part.step))
        assert weights is not None, "the request named a layer without a map"
        yield weights.float().cpu()


def entropy_of(weights: Tensor, implied: bool) -> Tensor:
    """(…, S) -> (…); of an implied matrix by the size of its entries."""
    return row_entropy(relative_weights(weights) if implied else weights)


def largest(weights: Tensor) -> Tensor:
    """(…, S) -> (…): the entry of the largest size; 0 if there is none."""
    if weights.shape[-1] == 0:
        return weights.new_zeros(weights.shape[:-1])
    return signed_pool(weights, lambda x: x.amax(-1))


def pool_rows(weights: Tensor, size: int) -> Tensor:
    """(H, n, S) -> (H, n, size): the entries of the largest size."""
    return signed_pool(weights, lambda x: adaptive_max_pool1d(x, size))


def pool_squares(weights: Tensor, pool: int) -> Tensor:
    """(1, n, S) -> (1, n / pool, S / pool), rounded up."""
    if pool == 1:
        return weights
    return signed_pool(weights, lambda x: max_pool2d(x, pool, ceil_mode=True))


def signed_pool(weights: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
    high = pool(weights)
    if weights.numel() == 0 or weights.min() >= 0:
        return high
    low = pool(-weights)
    return torch.where(high >= low, high, -low)


def to_bytes(weights: Tensor, scale: Tensor, implied: bool) -> Tensor:
    root = (weights.abs() / scale.clamp_min(1e-30)).sqrt()
    values = 128 + 127 * weights.sign() * root if implied else 255 * root
    return values.round().clamp(0, 255).to(torch.uint8)
