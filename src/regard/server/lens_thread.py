"""Attention maps, computed in a thread beside the engine's.

A pass over a long text takes seconds, in which streams must go on. The work of a request is split into parts: the
forward, then one part per layer, so that requests take turns. The forward of a text is kept for its next maps.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from regard.lens.maps import entropy, row_entropy
from regard.server.worker_thread import WorkerThread

THUMBNAIL_SIZE = 24
MAX_FORWARDS = 4  # that are kept
MAX_BYTES = 1 << 29  # of the forwards that are kept; the newest is kept in any case


class Recording(Protocol):
    """The attention of one sequence."""

    @property
    def nbytes(self) -> int: ...

    def layer_map(self, layer: int) -> Tensor | None:
        """(H, L, L) weights, or None for a layer without attention."""
        ...


class Lens(NamedTuple):
    """`record(ids)` runs the model once; `heads` is the number of heads per layer."""

    record: Callable[[Sequence[int]], Recording]
    heads: tuple[int, ...]


class LensThread:
    def __init__(self, lens: Lens):
        self.lens, self.heads = lens, lens.heads
        self._thread = WorkerThread("lens")
        self._recordings: OrderedDict[tuple[int, ...], Recording] = OrderedDict()  # used only in the thread

    def stop(self) -> None:
        self._thread.stop()

    async def overview(self, ids: list[int]) -> bytes:
        """A JSON array: thumbnails and entropies of the heads of each layer, or null."""
        layers = await self._run(ids, [(layer_overview, layer) for layer in range(len(self.heads))])
        return b"[" + b",".join(layers) + b"]"

    async def head(self, ids: list[int], layer: int, head: int) -> bytes:
        """A JSON object: the whole map of a head, and the entropy of its rows."""
        (view,) = await self._run(ids, [(head_map, layer, head)])
        return view

    async def _run(self, ids: list[int], parts: list[tuple[Any, ...]]) -> list[bytes]:
        with self._thread.request():
            recording = await self._thread.run(self._recording, tuple(ids))
            return [await self._thread.run(view, recording, *args) for view, *args in parts]

    def _recording(self, ids: tuple[int, ...]) -> Recording:
        """The attention of the sequence; the least recently used ones are dropped."""
        recording = self._recordings.pop(ids, None) or self.lens.record(ids)
        self._recordings[ids] = recording
        while len(self._recordings) > 1 and (
            len(self._recordings) > MAX_FORWARDS or sum(r.nbytes for r in self._recordings.values()) > MAX_BYTES
        ):
            self._recordings.popitem(last=False)
        return recording


def layer_overview(recording: Recording, layer: int) -> bytes:
    """A thumbnail, which has the largest weight of every patch, and the mean entropy of each head, as JSON."""
    weights = recording.layer_map(layer)
    if weights is None:
        return b"null"
    weights, size = weights.float(), min(THUMBNAIL_SIZE, weights.shape[-1])
    thumbnails = adaptive_max_pool2d(weights[None], size)[0]  # (H, size, size)
    return json_object(thumbnails=rounded(thumbnails, 3), entropy=rounded(entropy(weights), 4))


def head_map(recording: Recording, layer: int, head: int) -> bytes:
    weights = recording.layer_map(layer)
    assert weights is not None, "the request named a head of a layer without attention"
    weights = weights[head].float()  # (L, L)
    return json_object(weights=rounded(weights, 4), entropy=rounded(row_entropy(weights), 4))


def rounded(values: Tensor, decimals: int) -> list:
    return values.double().round(decimals=decimals).tolist()


def json_object(**fields: list) -> bytes:
    """JSON, encoded row by row: the encoder holds the interpreter's lock, and a whole map takes it 0.1 seconds."""
    members = [
        f'"{name}":[' + ",".join(json.dumps(row, separators=(",", ":")) for row in rows) + "]"
        for name, rows in fields.items()
    ]
    return ("{" + ",".join(members) + "}").encode()
