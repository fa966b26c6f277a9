"""What a drafter that reads the model's residual stream keeps per request: the states that it has not read, and a row.

    tokens      t_0 … t_{n-1}        the last of them is not computed yet
    stream      x_o … x_{n-2}        o: the first token whose state this drafter was given
    entries     (x_i, t_{i+1})       one slot each in the drafter's own store

A reused prefix or an interrupted request leaves a gap in the stream. The entries then start after it, at position 0 of
the row: the drafter reads less context, and its proposals may be worse.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.engine.memory import open_store
from regard.engine.request import Request, Sampling
from regard.engine.runner import batch_inputs
from regard.engine.scheduler import ScheduledBatch
from regard.engine.speculation.draft_model import CATCH_UP, CHUNK
from regard.engine.stores.base import ModelMemory
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.models.stack import States
from regard.parts.state import needs_snapshots


class RequestStream:
    """The residual stream of one request, from position `start` on."""

    def __init__(self) -> None:
        self.start = 0
        self.parts: list[Tensor] = []  # (L, D) each, adjacent

    @property
    def end(self) -> int:
        return self.start + sum(len(part) for part in self.parts)

    def add(self, position: int, x: Tensor) -> None:
        """The states (L, D) from this position on. They replace earlier ones, which were those of a rejected draft."""
        if not self.start <= position <= self.end:
            self.start, self.parts = position, []
        self.cut(position)
        self.parts.append(x)

    def cut(self, end: int) -> None:
        """Drop the states from position `end` on."""
        while self.parts and (excess := self.end - end) > 0:
            last = self.parts.pop()
            if len(last) > excess:
                self.parts.append(last[:-excess])

    def drop(self, position: int) -> None:
        """Drop the states before this position."""
        if position > self.start and self.parts:
            self.parts = [torch.cat(self.parts)[position - self.start :].clone()]
            self.start = position

    def read(self, start: int, end: int) -> Tensor:
        return torch.cat(self.parts)[start - self.start : end - self.start]  # (L, D)


class Streams:
    """The streams of all requests of an engine."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[Request, RequestStream] = WeakKeyDictionary()

    def record(self, batch: ScheduledBatch, x: Tensor, last: int | None = None) -> None:
        """After a forward of the model. last: how many states of a request are kept at most; None: all of them."""
        for b, (request, length) in enumerate(batch):
            first = 0 if last is None else max(0, length - last)
            part = x[b, first:length].clone()  # without the padding, which the other rows of x would keep in memory
            stream = self.of.setdefault(request, RequestStream())
            stream.add(request.cached + first, part)
            if last is not None:
                stream.drop(stream.end - last)

    def adopt(self, request: Request, other: Request) -> None:
        """Continue a request with the states of another candidate, which the same forward has computed."""
        stream = self.of[other]
        self.of[request].add(stream.start, stream.read(stream.start, stream.end))

    def last(self, request: Request) -> Tensor | None:
        """The state (D,) of the last computed token; None if it is not known."""
        stream, position = self.of.get(request), request.length - 2
        if stream is None or not stream.start <= position < stream.end:
            return None
        return stream.read(position, position + 1)[0]


class StreamRow:
    """A request in the drafter's store. own: the tokens of its entries, and how many of them are cached."""

    def __init__(self, target: Request, start: int):
        self.target, self.start = target, start
        self.own = Request((), Sampling())
        self.own.row = target.row

    @property
    def row(self) -> int:
        assert self.own.row is not None
        return self.own.row


class StreamRows:
    """The store of a drafter, in which every request of the engine has the row of the same number."""

    def __init__(
        self, streams: Streams, memory: ModelMemory, rows: int, capacity: int, like: Tensor, share: float | None = None
    ):
        if needs_snapshots(memory):
            raise ValueError(
                "the layers of this drafter have recurrent states, from which a rejected draft cannot be dropped; use "
                "layers with attention, or another method"
            )
        self.streams, self.capacity, self.device = streams, capacity, like.device
        self.store = open_store(Paged, memory, rows, capacity, like.dtype, like.device, 0, share)
        self.rows: dict[int, StreamRow] = {}

    def prepare(self, requests: Sequence[Request], lengths: Sequence[int]) -> dict[Request, StreamRow]:
        """The rows of the requests that can have a draft, with the entries of all their tokens and space for drafts.

        Each has at least one entry that is not cached.
        """
        for row, kept in list(self.rows.items()):
            if kept.target.row != row:  # it has ended, or lost its row
                self.release(row)
        pairs = zip(requests, lengths, strict=True)
        rows = {request: self.prepare_one(request, length) for request, length in pairs}
        self.store.upload()
        return {request: row for request, row in rows.items() if row is not None}

    def release(self, row: int) -> None:
        self.store.release(row)
        del self.rows[row]

    def prepare_one(self, request: Request, length: int) -> StreamRow | None:
        stream, known = self.streams.of.get(request), len(request.tokens) - 1
        assert request.row is not None
        if stream is None or stream.end < known:
            return None
        stream.cut(known)
        row = self.rows.get(request.row)
        if row is not None and row.start + row.own.cached < stream.start:  # there is a gap
            self.release(request.row)
            row = None
        start = stream.start if row is None else row.start
        entries, size = request.tokens[start + 1 :], known - start
        if size < 1 or size + length > self.capacity:
            return None
        if row is None:
            if self.store.admit(request.row, entries) is None:
                return None
            row = self.rows[request.row] = StreamRow(request, start)
        row.own.tokens = entries
        self.truncate(row, min(row.own.cached, size - 1))
        return row if self.store.reserve(request.row, size + length) else None

    def chunks(self, row: StreamRow) -> Iterator[int]:
        """The lengths of forwards that compute all but the last pending entries of a prompt."""
        while row.own.pending > CATCH_UP:
            yield min(CHUNK, row.own.pending - 1)

    def truncate(self, row: StreamRow, entries: int) -> None:
        """Drop the entries after the first ones."""
        if entries < row.own.cached:
            self.store.rewind(row.row, entries)
            row.own.cached = entries

    def pending_stream(self, row: StreamRow, count: int) -> Tensor:
        """(count, D) the states of the first pending entries."""
        first = row.start + row.own.cached
        return self.streams.of[row.target].read(first, first + count)

    def begin_forward(
        self, rows: Sequence[StreamRow], lengths: Sequence[int], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, TokenLayout, States, Tensor]:
        """Tokens (B, L) and layout of these entries, the states of the store, and the inputs (L, D) as (B, L, D)."""
        batch: Any = [(row.own, length) for row, length in zip(rows, lengths, strict=True)]
        tokens, layout, span = batch_inputs(batch, self.store, self.device)
        states = self.store.begin_forward(layout, span, check=False)
        for row, length in zip(rows, lengths, strict=True):
            row.own.cached += length
        return tokens, layout, states, torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)

    def after_reading(self, row: StreamRow) -> None:
        """Forget the states of cached entries, but for the last: it is needed again if the request gets no token."""
        self.streams.of[row.target].drop(row.start + row.own.cached - 1)
