"""Attention maps, computed in a thread beside the engine's.

A pass over a long text takes seconds, in which streams must go on. The work of a request is split into parts: the
forward, then one part per layer, so that requests take turns. The forward of a text is kept for its next maps.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from regard.lens.attention_layers import AttentionLayer
from regard.lens.detectors import HeadScores
from regard.server.binary_arrays import encode_arrays
from regard.server.map_parts import (
    MapShape,
    Recording,
    Thumbnails,
    head_part,
    layer_thumbnails,
)
from regard.server.worker_thread import WorkerThread

MAX_FORWARDS = 4  # that are kept
MAX_BYTES = 1 << 29  # of the forwards that are kept; the newest is kept in any case

Sequences = tuple[tuple[int, ...], tuple[int, ...]]  # the ids, and the input of the decoder of an encoder-decoder


class Lens(NamedTuple):
    """`record(ids, target)` runs the model once; `score()` returns the scores of its heads.

    `vocab` counts the tokens of the ids, `target_vocab` those of the output of an encoder-decoder, which begins with
    the ids of `start`.
    """

    record: Callable[[Sequence[int], Sequence[int]], Recording]
    layers: tuple[AttentionLayer, ...]
    vocab: int
    score: Callable[[], HeadScores] | None = None
    start: tuple[int, ...] = ()
    target_vocab: int = 0

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(layer.heads for layer in self.layers)

    def shape(self, layer: int, sequences: Sequences) -> MapShape:
        stack = self.layers[layer].stack
        source, target = map(len, sequences)
        queries = target if stack in ("decoder", "cross") else source
        keys = target if stack == "decoder" else source
        return MapShape(self.heads[layer], queries, keys, self.layers[layer].implied)


class LensThread:
    def __init__(self, lens: Lens, thread: WorkerThread):
        self.lens, self.heads, self._thread = lens, lens.heads, thread
        self._recordings: OrderedDict[Sequences, Recording] = OrderedDict()  # used only in the thread
        self._scores: asyncio.Task[HeadScores] | None = None

    async def overview(self, sequences: Sequences, layers: range) -> bytes:
        """The thumbnails and entropies of the heads of these layers."""
        shapes = {layer: self.lens.shape(layer, sequences) for layer in layers if self.heads[layer]}
        found = await self._run(sequences, [(layer_thumbnails, layer, shape) for layer, shape in shapes.items()])
        return await asyncio.to_thread(encode_overview, dict(zip(shapes, found, strict=True)))

    async def head(
        self, sequences: Sequences, layer: int, head: int, rows: range, columns: range, pool: int = 1
    ) -> bytes:
        """A part of the map of a head, and the entropy of its rows."""
        shape = self.lens.shape(layer, sequences)
        (part,) = await self._run(sequences, [(head_part, layer, shape, head, rows, columns, pool)])
        return await asyncio.to_thread(encode_arrays, {}, part._asdict())

    async def scores(self) -> HeadScores | None:
        """What the heads do; computed once, or again if it failed."""
        if self.lens.score is None:
            return None
        scores = self._scores
        if scores is None or scores.done() and (scores.cancelled() or scores.exception() is not None):
            self._scores = scores = asyncio.ensure_future(self._score(self.lens.score))
        return await asyncio.shield(scores)  # a client that disconnects does not stop it

    async def _score(self, score: Callable[[], HeadScores]) -> HeadScores:
        with self._thread.request():
            return await self._thread.run(score)

    async def _run(self, sequences: Sequences, parts: list[tuple[Any, ...]]) -> list[Any]:
        with self._thread.request():
            recording = await self._thread.run(self._recording, sequences)
            return [await self._thread.run(view, recording, *args) for view, *args in parts]

    def _recording(self, sequences: Sequences) -> Recording:
        """The attention of the sequence; the least recently used ones are dropped."""
        recording = self._recordings.pop(sequences, None) or self.lens.record(*sequences)
        self._recordings[sequences] = recording
        while len(self._recordings) > 1 and (
            len(self._recordings) > MAX_FORWARDS or sum(r.nbytes for r in self._recordings.values()) > MAX_BYTES
        ):
            self._recordings.popitem(last=False)
        return recording


def encode_overview(found: dict[int, Thumbnails]) -> bytes:
    """The arrays of all layers, one after the other; the header has their sizes."""
    layers = [
        dict(zip(("layer", "heads", "rows", "columns"), (layer, *thumbnails.pixels.shape), strict=True))
        for layer, thumbnails in found.items()
    ]
    arrays = {
        name: torch.cat([getattr(thumbnails, name).flatten() for thumbnails in found.values()])
        for name in Thumbnails._fields
        if found
    }
    return encode_arrays({"layers": layers}, arrays)
