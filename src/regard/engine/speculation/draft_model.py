"""A draft model: a smaller decoder with the same vocabulary, which generates the draft token by token.

    k forwards of the draft model, one of the target        speed-up (1 - α^(k+1)) / ((1 - α) (1 + k·c))

It has a store of its own, in which every request of the engine has the row of the same number. Before a draft the row
returns to the last token that the target has accepted, and the tokens after it are computed. A request that is sampled
gets a draft that is sampled with the same temperature and filters, and the distributions that its tokens are drawn
from. Leviathan et al. 2023, Chen et al. 2023.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regard.engine.inputs import checked_capacity, decoder_of
from regard.engine.memory import open_store
from regard.engine.request import Draft, Request, Sampling
from regard.engine.runner import Runner
from regard.engine.scheduler import ScheduledBatch
from regard.engine.speculation.draw_drafts import DrawnToken, as_draft, draw_drafts
from regard.engine.stores.base import Snapshot
from regard.engine.stores.paged import Paged
from regard.models.decoder import DecoderModule
from regard.parts.state import needs_snapshots

CHUNK = 256  # tokens of a prompt per forward
CATCH_UP = 16  # more pending tokens than this are computed apart from those of other requests


class DraftRow:
    """A request as the draft model has it. own: what its runner reads of a request."""

    def __init__(self, target: Request, row: int):
        self.target = target
        self.own = Request(target.ids, Sampling())
        self.own.row = row
        self.snapshot: Snapshot | None = None  # after the last accepted token


class DraftModel:
    def __init__(self, model: torch.nn.Module, compile: bool = False, memory: float | None = None):
        """compile, memory: of its decode steps and its store, as for the engine."""
        self.model, self.compile, self.memory = decoder_of(model), compile, memory
        self.rows: dict[int, DraftRow] = {}
        self.capacity = 0

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        spec, weight, device = self.model.spec, next(self.model.parameters()), next(target.parameters()).device
        if spec.vocab != target.spec.vocab:
            raise ValueError(
                f"the draft model has {spec.vocab} ids, the model {target.spec.vocab}; "
                "choose a draft model with the same tokenizer"
            )
        if weight.device != device:
            raise ValueError(f"the draft model is on {weight.device}, not on {device}")
        self.capacity = min(capacity, checked_capacity(spec, None))
        self.store = open_store(Paged, spec.memory(), rows, self.capacity, weight.dtype, weight.device, 0, self.memory)
        self.model.eval()
        self.runner = Runner(self.model, None, self.store)
        if self.compile:
            self.runner.compile()
        self.recurrent = needs_snapshots(spec.memory())

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        self.release_ended()
        drafts: dict[Request, list[DrawnToken]] = {request: [] for request in requests}
        pairs = zip(requests, lengths, strict=True)
        rows = {r: length for request, length in pairs if (r := self.prepare(request, length)) is not None}
        self.catch_up(list(rows))
        if all(row.target.sampling.temperature == 0 for row in rows):
            self.draft_greedily(rows, drafts)
            return [as_draft(tokens) for tokens in drafts.values()]
        for i in range(max(rows.values(), default=0)):  # a draft ends early where the logits are not finite
            active = [row for row, length in rows.items() if length > i == len(drafts[row.target])]
            for row, token in self.next_tokens(active, i) if active else []:
                if token is not None:
                    row.own.tokens.append(token.id)
                    drafts[row.target].append(token)
        return [as_draft(tokens) for tokens in drafts.values()]

    def release_ended(self) -> None:
        """Release the rows of requests that have ended, or lost their row in the engine."""
        for row, drafted in list(self.rows.items()):
            if drafted.target.row != row:
                self.store.release(row)
                del self.rows[row]

    def prepare(self, request: Request, length: int) -> DraftRow | None:
        """The row of a request, with its accepted tokens and space for a draft; None if it cannot have one."""
        if request.embeddings is not None or request.source_length:
            return None  # the draft model does not have them
        if request.length + length > self.capacity:
            return None
        assert request.row is not None
        row = self.rows.get(request.row)
        if row is None:
            if self.store.admit(request.row, request.tokens) is None:
                return None
            row = self.rows[request.row] = DraftRow(request, request.row)
        else:
            row.own.unread = 0  # after a draft that failed
            self.rewind(row)
        row.own.tokens = list(request.tokens)
        return row if self.store.reserve(request.row, request.length + length) else None

    def rewind(self, row: DraftRow) -> None:
        """Drop what the target has rejected."""
        own, accepted = row.own, common_prefix(row.own.tokens, row.target.tokens)
        keep = min(own.cached, accepted, len(row.target.tokens) - 1)
        if keep < own.cached:
            assert own.row is not None
            if self.recurrent and row.snapshot is not None:
                keep = row.snapshot.length
            self.store.rewind(own.row, keep, row.snapshot)
            own.cached = keep

    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Compute all but the last pending tokens of prompts, in chunks."""
        self.store.upload()
        for own in (row.own for row in rows):
            while own.pending > CATCH_UP:
                length = min(CHUNK, own.pending - 1)
                self.runner.forward([(own, length)])
                own.cached += length

    def draft_greedily(self, rows: Mapping[DraftRow, int], drafts: Mapping[Request, list[DrawnToken]]) -> None:
        """Add the most likely tokens to the drafts of rows. They are read once, after all forwards."""
        chosen: list[tuple[list[DraftRow], Tensor]] = []
        for i in range(max(rows.values(), default=0)):
            ordered, logits = self.forward([row for row, length in rows.items() if length > i], i)
            chosen.append((ordered, logits.argmax(-1)))
            self.runner.keep_last([row.own for row in ordered], chosen[-1][1])
            for row in ordered:
                row.own.unread += 1
        ids = torch.cat([ids for _, ids in chosen]).tolist() if chosen else []
        for row, id in zip((row for ordered, _ in chosen for row in ordered), ids, strict=True):
            row.own.unread = 0
            row.own.tokens.append(id)
            drafts[row.target].append(DrawnToken(id, None))

    def forward(self, rows: Sequence[DraftRow], i: int) -> tuple[list[DraftRow], Tensor]:
        """The rows in the order of the store, and their logits (B, V) after token i - 1 of the draft."""
        of = {row.own: row for row in rows}
        batch: ScheduledBatch = [(own, own.pending) for own in of]
        logits = self.runner.forward(batch)  # the batch is in the order of the rows then
        for own, length in batch:
            own.cached += length
            if i == 0 and self.recurrent:
                assert own.row is not None
                of[own].snapshot = self.store.snapshot(own.row)
        return [of[own] for own, _ in batch], logits

    def next_tokens(self, rows: Sequence[DraftRow], i: int) -> list[tuple[DraftRow, DrawnToken | None]]:
        """Token i of the drafts; None where the logits are not finite."""
        ordered, logits = self.forward(rows, i)
        return list(zip(ordered, draw_drafts(logits, [row.target for row in ordered], i), strict=True))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
